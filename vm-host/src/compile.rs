//! Compiles the device source to a cubin, cached by everything that it depends on.

use std::path::{Path, PathBuf};
use std::time::Instant;

use abi::{Feature, Unpack};
use ir::program::staging::{Staging, WARP_UNITS_MAX};
use ir::program::{Buffer, BufferSource, PackedModel, Program};
use ir::schedule::Evict;
use ir::{Activation, Format, Graph, KernelConfig, KvDtype};
use vm_device::{ARCHITECTURES, Architecture, FormatShares, PrefillVariant, Source, Variant};

use crate::error::HostError;
use crate::nvrtc::{self, Nvrtc, Output};

/// A compiled kernel.
#[derive(Clone, Debug)]
pub struct Cubin {
    /// The machine code.
    pub image: Vec<u8>,
    /// The compiler's log, with registers and spills of each kernel.
    pub log: String,
    /// Identifies the build: hash of source, options and architecture.
    pub kernel_id: String,
    /// Whether it came from the cache.
    pub cached: bool,
}

/// The assembler's report on one kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resources {
    /// Entry point.
    pub kernel: String,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of registers spilled to local memory, stores and loads together.
    pub spills: u32,
    /// Bytes of stack.
    pub stack: u32,
}

/// The variant for a schedule's kernel knobs and a model's shapes.
#[must_use]
pub fn variant(kernel: &KernelConfig, graph: &Graph) -> Variant {
    let packed = PackedModel::new(graph);
    Variant {
        dtype: graph.dtype,
        unpack: unpack_mask(&packed),
        head_dim: graph.head_dim,
        group: graph.group(),
        qk_norm: graph.layers.iter().any(|layer| graph.norms_each_head(layer)),
        features: features(graph),
        widths: [graph.hidden, graph.heads * graph.head_dim, graph.ffn_width()],
        shares: share_mask(graph, &packed, |_| true),
        format_shares: has_scales(&packed).then(|| {
            let of = |number| share_mask(graph, &packed, |unpack| unpack as usize == number);
            FormatShares(std::array::from_fn(of))
        }),
        poll_sleep_ns: kernel.poll_sleep_ns,
        evict_first: kernel.evict == Evict::First,
        seqs: 1,
        devices: 1,
        masks: false,
        trace: vm_device::Trace::Off,
        first_task: 0,
    }
}

/// What the model needs beside what every kernel has. Bit n: the `Feature` of number n.
pub(crate) fn features(graph: &Graph) -> u32 {
    let normed = |layer: &ir::Layer| graph.norms_all_heads(layer);
    let post_normed =
        |layer: &ir::Layer| layer.attention.post_norm.or(layer.mlp.post_norm).is_some();
    let experts = || graph.layers.iter().filter_map(experts_of);
    let needed = [
        (Feature::GeluTanh, graph.activation == Activation::GeluTanh),
        (Feature::ScoreCap, graph.score_cap.is_some()),
        (Feature::LogitCap, graph.logit_cap.is_some()),
        (Feature::EmbedScale, graph.embed_scale != 1.0),
        (Feature::Norm, graph.layers.iter().any(normed)),
        (Feature::Route, experts().next().is_some()),
        (Feature::Sinks, graph.layers.iter().any(|layer| layer.attention.body.sinks.is_some())),
        (Feature::ClampedSilu, experts().any(|experts| experts.clamped.is_some())),
        (Feature::PostNorm, graph.layers.iter().any(post_normed)),
        (Feature::F32Rows, Format::of(graph.tensor(graph.embed).dtype, graph.dtype).is_rows()),
    ];
    let needed = needed
        .iter()
        .fold(0, |mask, (feature, needed)| mask | u32::from(*needed) << *feature as u32);
    needed | kv_feature(graph.kv_dtype)
}

/// The feature of caches of an element type, as a mask.
pub(crate) fn kv_feature(dtype: KvDtype) -> u32 {
    u32::from(dtype == KvDtype::E4m3) << Feature::KvE4m3 as u32
}

/// Refuses a program whose caches or embedding are of another type than those that the kernel was compiled for: every row would be read wrongly.
pub(crate) fn check_stored(program: &Program, variant: &Variant) -> Result<(), HostError> {
    check_caches(program, variant)?;
    check_embedding(program, variant)
}

fn check_caches(program: &Program, variant: &Variant) -> Result<(), HostError> {
    let (kv, compiled) = (program.kv_dtype(), variant.features & kv_feature(KvDtype::E4m3));
    if kv_feature(kv) != compiled {
        let of = if compiled == 0 { KvDtype::F16 } else { KvDtype::E4m3 };
        return Err(HostError::Request(format!(
            "the program has key/value caches of {}, and the kernel was compiled for {} (--kv-dtype)",
            kv.name(),
            of.name()
        )));
    }
    Ok(())
}

fn check_embedding(program: &Program, variant: &Variant) -> Result<(), HostError> {
    let compiled = variant.features >> Feature::F32Rows as u32 & 1 != 0;
    let other = |buffer: &Buffer| match buffer.source {
        BufferSource::Embedding(matrix) => {
            program.matrices[matrix.index()].format.is_rows() != compiled
        }
        BufferSource::Scratch
        | BufferSource::Vector(_)
        | BufferSource::Rotary(_)
        | BufferSource::KvCache { .. } => false,
    };
    if program.buffers.iter().any(other) {
        let of = |rows: bool| if rows { "f32" } else { "the operands' type" };
        return Err(HostError::Request(format!(
            "the program has an embedding of {}, and the kernel was compiled for {}",
            of(!compiled),
            of(compiled)
        )));
    }
    Ok(())
}

fn experts_of(layer: &ir::Layer) -> Option<&ir::Experts> {
    match &layer.mlp.body {
        ir::FeedForward::Experts(experts) => Some(experts),
        ir::FeedForward::Gated(_) => None,
    }
}

/// What is done to the weights of each product, and units of a tile. A product over several experts' columns has those of all.
fn product_tiles<'p>(
    graph: &'p Graph,
    packed: &'p PackedModel,
) -> impl Iterator<Item = (Unpack, u32)> + 'p {
    let plain = packed.matrices.iter();
    let plain = plain.filter(|matrix| matrix.experts == 1 && !matrix.format.is_rows());
    let of_experts = graph.layers.iter().zip(&packed.layers).filter_map(|(layer, matrices)| {
        let experts = experts_of(layer)?;
        let product = |id: ir::MatrixId, slots: u32| {
            let matrix = &packed.matrices[id.index()];
            (matrix.format.unpack(), slots * matrix.units_per_tile())
        };
        Some([product(matrices.mlp.gate_up.id, 1), product(matrices.mlp.down.id, experts.top_k)])
    });
    let plain = plain.map(|matrix| (matrix.format.unpack(), matrix.units_per_tile()));
    plain.chain(of_experts.flatten())
}

/// Whether units of some matrix have scales behind them.
fn has_scales(packed: &PackedModel) -> bool {
    packed.matrices.iter().any(|matrix| matrix.format.unit_bytes() > abi::UNIT_BYTES)
}

/// What the kernel does to the elements of the model's matrices. Bit n: the `Unpack` of number n.
pub(crate) fn unpack_mask(packed: &PackedModel) -> u32 {
    let multiplied = packed.matrices.iter().filter(|matrix| !matrix.format.is_rows());
    multiplied.fold(0, |mask, matrix| mask | 1 << matrix.format.unpack() as u32)
}

/// Warp fragments to compile for products of these kinds. Bit n: tiles of some matrix are taken in fragments of n units per warp. Bit 0: some
/// warp has a shorter fragment than the loop for its size assumes elsewhere. Loops for other sizes are not compiled; the widths of the model's vectors
/// are those of its matrices.
fn share_mask(graph: &Graph, packed: &PackedModel, of: impl Fn(Unpack) -> bool) -> u32 {
    let scaled = has_scales(packed);
    product_tiles(graph, packed)
        .filter(|(unpack, _)| of(*unpack))
        .map(|(_, tile)| (tile, Staging::new(tile, abi::STAGE_UNITS_MAX, scaled)))
        .filter(|(_, staging)| staging.warp_units > 0)
        .fold(0, |mask, (tile, staging)| mask | share_bits(tile, &staging))
}

/// The bits of [`share_mask`] for tiles of `tile` units.
pub(crate) fn share_bits(tile: u32, staging: &Staging) -> u32 {
    let full = staging.warp_units == WARP_UNITS_MAX;
    let short = full && staging.stage_units < abi::STAGE_UNITS_MAX;
    let short_last = tile > staging.stage_units && !tile.is_multiple_of(staging.stage_units);
    1 << staging.warp_units | u32::from(short || short_last)
}

/// Compiler options of a variant for an architecture such as `sm_90a`.
#[must_use]
pub fn options(variant: &Variant, arch: &str) -> Vec<String> {
    all_options(arch, variant.defines())
}

/// The row of an architecture. An unsupported one gets the first row: it is never compiled, but needs ids.
fn row(arch: &str) -> &'static Architecture {
    Architecture::named(arch).unwrap_or(&ARCHITECTURES[0])
}

fn all_options(arch: &str, defines: Vec<String>) -> Vec<String> {
    let mut options = vec![
        format!("--gpu-architecture={arch}"),
        "-std=c++17".into(),
        "--ptxas-options=-v".into(),
        "-lineinfo".into(),
        "--device-as-default-execution-space".into(), // lambdas are device code
    ];
    options.extend(row(arch).defines());
    options.extend(defines);
    options
}

/// Device sources as one text: those embedded in this build, or the files of `$AMK_KERNEL_DIR` (a copy of the `vm-device` folder), so that
/// work on the kernel needs no new build of the host.
fn unit(sources: impl Iterator<Item = &'static Source>) -> Result<String, HostError> {
    let dir = std::env::var_os("AMK_KERNEL_DIR").map(PathBuf::from);
    let mut text = String::new();
    for source in sources {
        let read = dir.as_ref().map(|dir| {
            let path = dir.join(source.name);
            std::fs::read_to_string(&path).map_err(|error| {
                HostError::Compile(format!(
                    "AMK_KERNEL_DIR: cannot read {}: {error}",
                    path.display()
                ))
            })
        });
        let read = read.transpose()?;
        let file = read.as_deref().unwrap_or(source.text);
        text += &format!("#line 1 \"{}\"\n{file}\n", source.name);
    }
    Ok(text)
}

/// The id that [`compile`] returns: it depends only on code, options and architecture, so it is known without a compiler.
#[must_use]
pub fn kernel_id(variant: &Variant, arch: &str) -> String {
    let source = unit(row(arch).sources.iter()).unwrap_or_default();
    crate::kernel_id::kernel_id(&source, &options(variant, arch))
}

/// The same for the kernels that run a prompt chunk by chunk.
pub(crate) fn prefill_kernel_id(variant: &PrefillVariant, arch: &str) -> String {
    let source = unit(row(arch).prefill_unit()).unwrap_or_default();
    crate::kernel_id::kernel_id(&source, &all_options(arch, variant.defines()))
}

/// Compiles a variant, or takes it from `cache`.
///
/// # Errors
/// If NVRTC is missing or refuses the source.
pub fn compile(variant: &Variant, arch: &str, cache: Option<&Path>) -> Result<Cubin, HostError> {
    compile_unit(&unit(row(arch).sources.iter())?, &options(variant, arch), cache)
}

/// The same for the kernels that run a prompt chunk by chunk.
///
/// # Errors
/// If NVRTC is missing or refuses the source.
pub fn compile_prefill(
    variant: &PrefillVariant,
    arch: &str,
    cache: Option<&Path>,
) -> Result<Cubin, HostError> {
    let source = unit(row(arch).prefill_unit())?;
    compile_unit(&source, &all_options(arch, variant.defines()), cache)
}

fn compile_unit(
    source: &str,
    options: &[String],
    cache: Option<&Path>,
) -> Result<Cubin, HostError> {
    let nvrtc = Nvrtc::get()?;
    let (major, minor) = nvrtc.version();
    let id = crate::kernel_id::kernel_id(source, options);
    // Line numbers and comments are part of what a profiler shows, so the cache goes by the whole text.
    let exact = crate::kernel_id::digest(source, options);
    let file = cache.map(|dir| dir.join(format!("{exact}-nvrtc{major}.{minor}")));
    if let Some(cubin) = file.as_deref().and_then(|file| read_cached(file, &id)) {
        tracing::debug!(kernel = id, "kernel taken from the cache");
        return Ok(cubin);
    }
    let began = Instant::now();
    let (image, log) = nvrtc.compile(source, options, Output::Cubin)?;
    tracing::info!(kernel = id, seconds = began.elapsed().as_secs_f32(), "kernel compiled");
    if let Some(file) = &file {
        write_cached(file, &image, &log);
    }
    Ok(Cubin { image, log, kernel_id: id, cached: false })
}

/// Where cubins are kept: `$AMK_CACHE`, else the user's cache folder.
#[must_use]
pub fn default_cache() -> Option<PathBuf> {
    if let Some(dir) = std::env::var_os("AMK_CACHE") {
        return Some(dir.into());
    }
    let base = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?;
    Some(base.join("amk"))
}

/// A cache entry is the image, its log, and a hash over both, so that a torn or edited file is compiled anew.
fn read_cached(file: &Path, id: &str) -> Option<Cubin> {
    let bytes = std::fs::read(file).ok()?;
    let (hash, rest) = bytes.split_at_checked(32)?;
    if blake3::hash(rest).as_bytes() != hash {
        return None;
    }
    let (len, rest) = rest.split_at_checked(8)?;
    let (image, log) =
        rest.split_at_checked(usize::try_from(u64::from_le_bytes(len.try_into().ok()?)).ok()?)?;
    Some(Cubin {
        image: image.to_vec(),
        log: String::from_utf8_lossy(log).into(),
        kernel_id: id.into(),
        cached: true,
    })
}

/// Failing to cache is not failing to compile: errors are ignored on purpose.
fn write_cached(file: &Path, image: &[u8], log: &str) {
    let mut rest = (image.len() as u64).to_le_bytes().to_vec();
    rest.extend_from_slice(image);
    rest.extend_from_slice(log.as_bytes());
    let mut bytes = blake3::hash(&rest).as_bytes().to_vec();
    bytes.append(&mut rest);
    let temporary = file.with_extension(format!("tmp{}", std::process::id()));
    let written = file.parent().map(std::fs::create_dir_all).is_some_and(|made| made.is_ok())
        && std::fs::write(&temporary, bytes).is_ok();
    if !written || std::fs::rename(&temporary, file).is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
}

/// The PTX of a variant, which is compiled for it: the cache has none.
///
/// # Errors
/// If NVRTC is missing or refuses the source.
pub fn ptx(variant: &Variant, arch: &str) -> Result<String, HostError> {
    let source = unit(row(arch).sources.iter())?;
    let (text, _) = Nvrtc::get()?.compile(&source, &options(variant, arch), Output::Ptx)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// A program of the CUDA toolkit: in `PATH`, or where NVRTC is looked for.
#[must_use]
pub fn cuda_tool(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let beside = nvrtc::folders().into_iter().filter_map(|lib| Some(lib.parent()?.join("bin")));
    let mut folders = std::env::split_paths(&path).chain(beside).map(|folder| folder.join(name));
    folders.find(|file| file.is_file())
}

/// Reads registers, stack and spills of each kernel, with those of the functions that it calls, from the assembler's lines in `log`.
#[must_use]
pub fn resources(log: &str) -> Vec<Resources> {
    let number_before = |line: &str, what: &str| -> u32 {
        let before = line.split(what).next().unwrap_or_default();
        before.split_whitespace().last().and_then(|word| word.parse().ok()).unwrap_or_default()
    };
    let mut found: Vec<Resources> = Vec::new();
    let mut current = String::new(); // the function that the next numbers belong to: a kernel, or one that it calls
    for line in log.lines() {
        let name =
            |marker: &str| line.split(marker).nth(1).map(|rest| rest.trim_matches('\'').to_owned());
        if let Some(kernel) = name("Compiling entry function ") {
            let kernel = kernel.split('\'').next().unwrap_or_default().to_owned();
            found.push(Resources { kernel, registers: 0, spills: 0, stack: 0 });
        } else if let Some(function) = name("Function properties for ") {
            current = function;
        } else if let Some(last) = found.last_mut() {
            if line.contains("bytes stack frame") {
                // Functions that are not inlined count against the kernel that calls them.
                last.stack += number_before(line, "bytes stack frame");
                last.spills += number_before(line, "bytes spill stores")
                    + number_before(line, "bytes spill loads");
            } else if line.contains("registers") && (current == last.kernel || current.is_empty()) {
                last.registers = number_before(line, "registers");
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of the fragments in a mask.
    fn fragments(mask: u32) -> Vec<u32> {
        (1..32).filter(|units| mask >> units & 1 != 0).collect()
    }

    #[test]
    fn loops_are_compiled_for_what_matrices_of_a_format_are_taken_in() {
        let shares = |name: &str| {
            let graph = model::preset(name).unwrap_or_else(|| panic!("no {name}")).graph;
            let variant = variant(&KernelConfig::default(), &graph);
            let all = fragments(variant.shares);
            let of = |shares: FormatShares| {
                let formats = Unpack::ALL.iter().zip(shares.0).filter(|(_, mask)| *mask != 0);
                formats.map(|(unpack, mask)| (*unpack, fragments(mask))).collect::<Vec<_>>()
            };
            (all, variant.format_shares.map(of))
        };
        assert_eq!(shares("llama-3.2-1b"), (vec![8], None));
        assert_eq!(shares("llama-3.1-8b-fp8"), (vec![7, 8], None), "no scales behind units");
        let int4 = vec![(Unpack::None, vec![8]), (Unpack::Int4G128, vec![4, 7])];
        assert_eq!(shares("llama-3.1-8b-int4-g128"), (vec![4, 7, 8], Some(int4)));
        // Attention and the output matrix in 16 bits; `gate_up`, and `down` over four experts' columns.
        let experts = vec![(Unpack::None, vec![6, 8]), (Unpack::Mxfp4, vec![3, 6])];
        assert_eq!(shares("gpt-oss-20b"), (vec![3, 6, 8], Some(experts)));
    }

    #[test]
    fn spills_are_read_past_the_functions_that_follow() {
        let log = "\
ptxas info    : Compiling entry function 'amk_megakernel' for 'sm_90a'
ptxas info    : Function properties for amk_megakernel
ptxas         .     160 bytes stack frame, 184 bytes spill stores, 528 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 160 bytes cumulative stack size
ptxas info    : Function properties for _Z4trapP6Sharedjjjjy
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'amk_bandwidth' for 'sm_90a'
ptxas info    : Function properties for amk_bandwidth
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 20 registers, used 0 barriers
";
        let kernel = |name: &str, registers, spills, stack| Resources {
            kernel: name.into(),
            registers,
            spills,
            stack,
        };
        assert_eq!(
            resources(log),
            [kernel("amk_megakernel", 168, 712, 160), kernel("amk_bandwidth", 20, 0, 0)]
        );
    }
}
