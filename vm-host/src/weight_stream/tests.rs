//! Weight streaming without a device: the packed bytes, their order, and every failure on the way.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Condvar;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use ir::program::{Matrix, Program, RowMap, Verified};
use ir::schedule::{neutral_config, validate};
use ir::{DType, Format, Target as Gpu, TensorId};
use model::Model;

use super::scripted::{Mishap, Scripted};
use super::*;
use crate::devices::{Tiles, all_tiles};
use crate::weight_stream::plan::{Piece, TensorRows, pack};

const GOLDEN: [&str; 5] =
    ["llama-tied-f32", "llama3-rope-bf16", "mistral-f16", "qwen2-bias-bf16", "qwen3-qknorm-bf16"];

/// The packed matrix, element by element: units of 8 rows by 64 bytes; in 16-bit columns, bits 2 and 3 of the column number are swapped.
fn packed_by_definition(matrix: &Matrix, weights: &dyn Weights) -> Vec<u8> {
    let mut packed = vec![0; matrix.bytes() as usize];
    let element = matrix.format.stored().bytes();
    let (columns, units) = (64 / element, matrix.units_per_tile() as usize);
    for row in 0..matrix.rows() {
        let Some((tensor, from)) = matrix.map.locate(row) else { continue };
        let (tile, row) = (row as usize / 8, row as usize % 8);
        for column in 0..matrix.cols as usize {
            let (unit, at) = (column / columns, column % columns);
            let at = if element == 2 { at & !12 | (at & 4) << 1 | (at & 8) >> 1 } else { at };
            let to = (tile * units + unit) * 512 + row * 64 + at * element;
            let stored = (from as usize * matrix.cols as usize + column) * element;
            packed[to..][..element].copy_from_slice(&weights.bytes(tensor)[stored..][..element]);
        }
    }
    packed
}

/// The tensors of a preset, which count how often they are made and that none is kept.
struct Made<'a>(&'a Model, Mutex<BTreeMap<u32, usize>>);

impl Weights for Made<'_> {
    fn bytes(&self, tensor: TensorId) -> &[u8] {
        unreachable!("{tensor} would stay in memory")
    }

    fn read(&self, tensor: TensorId) -> Cow<'_, [u8]> {
        *self.1.lock().expect("no panic").entry(tensor.0).or_default() += 1;
        Cow::Owned(self.0.weights.read(tensor).into_owned())
    }
}

#[test]
fn weights_that_are_made_are_made_once_and_not_kept_by_a_loader() {
    let model = model::preset("toy-2l").expect("a preset");
    let plan = Arc::new(plan(&model));
    let (made, mut memory) = (Made(&model, Mutex::default()), Memory::new(&plan));
    in_memory::land(&plan, &made, &mut memory).expect("it lands");
    assert!(made.1.lock().expect("no panic").values().all(|&count| count == 1));
    for (matrix, there) in plan.matrices.iter().zip(&memory.matrices) {
        assert!(*there == packed_by_definition(matrix, &*model.weights), "{}", matrix.name);
    }
}

/// Drawing an expert's matrix keeps one core busy, so the tensors of a round are read side by side. Dealt to two devices, each is still read once.
#[test]
fn tensors_of_an_experts_round_are_read_at_once() {
    /// Reads that wait for one beside them.
    struct Beside<'a>(&'a Model, Mutex<[usize; 3]>, Condvar);
    impl Weights for Beside<'_> {
        fn bytes(&self, tensor: TensorId) -> &[u8] {
            unreachable!("{tensor} would stay in memory")
        }
        fn read(&self, tensor: TensorId) -> Cow<'_, [u8]> {
            let mut counts = self.1.lock().expect("no panic");
            counts[0] += 1;
            counts[1] += 1;
            counts[2] = counts[2].max(counts[1]);
            self.2.notify_all();
            let limit = Duration::from_secs(5);
            let alone = |counts: &mut [usize; 3]| counts[2] < 2;
            counts = self.2.wait_timeout_while(counts, limit, alone).expect("no panic").0;
            counts[1] -= 1;
            self.0.weights.read(tensor)
        }
    }
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/families/mixtral-bf16");
    let model = model::import(&dir).expect("a golden model");
    let matrices: Vec<_> = matrices(&model).into_iter().filter(|m| m.experts > 1).collect();
    let part = |first: bool| {
        let half = |matrix: &Matrix| {
            let each = matrix.tiles() / matrix.experts;
            let own = if first { 0..each / 2 } else { each / 2..each };
            crate::experts::of_all(matrix, own).collect()
        };
        matrices.iter().map(half).collect::<Tiles>()
    };
    let plan = Plan::new(&matrices, &[part(true), part(false)]).expect("a plan");
    let weights = Beside(&model, Mutex::default(), Condvar::new());
    let mut memory = Memory::new(&plan);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("a pool");
    pool.install(|| in_memory::land(&plan, &weights, &mut memory)).expect("it lands");
    let parts = matrices.iter().flat_map(|matrix| &matrix.map.parts);
    let tensors = parts.filter(|(tensor, _)| tensor.is_some()).count();
    assert_eq!(*weights.1.lock().expect("no panic"), [tensors, 0, 2]);
}

#[test]
fn weights_in_memory_land_as_those_of_files_do() {
    struct InMemory(Vec<Vec<u8>>);
    impl Weights for InMemory {
        fn bytes(&self, tensor: TensorId) -> &[u8] {
            &self.0[tensor.index()]
        }
    }
    for name in GOLDEN {
        let model = golden(name);
        let tensors = 0..model.graph.tensors.len() as u32;
        let weights =
            InMemory(tensors.map(|t| model.weights.bytes(TensorId(t)).to_vec()).collect());
        let plan = Arc::new(plan(&model));
        let mut memory = Memory::new(&plan);
        let report = in_memory::land(&plan, &weights, &mut memory).expect("it lands");
        let stored: u64 = plan.pieces.iter().map(|piece| plan.stored_bytes(piece)).sum();
        assert_eq!((report.bytes, report.source.as_str()), (stored, "memory"));
        for (matrix, watermark) in plan.matrices.iter().zip(&memory.matrices) {
            assert!(
                *watermark == packed_by_definition(matrix, &weights),
                "{name}, {}",
                matrix.name
            );
        }
        assert_order(&plan, &memory.said);
        memory.broken = true;
        assert!(
            in_memory::land(&plan, &weights, &mut memory).is_err(),
            "a copy that fails is seen"
        );
    }
}

/// A limit that is long for a disk, short for a test.
const LIMIT: Duration = Duration::from_millis(300);

fn golden(name: &str) -> Model {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/golden").join(name);
    model::import(&dir).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// A copy of a golden model that may be spoiled.
fn copied(name: &str, to: &Path) -> Model {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/golden").join(name);
    for entry in std::fs::read_dir(&dir).expect("the model") {
        let path = entry.expect("an entry").path();
        if path.is_file() {
            std::fs::copy(&path, to.join(path.file_name().expect("a name"))).expect("a copy");
        }
    }
    model::import(to).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn matrices(model: &Model) -> Vec<Matrix> {
    lowered(model).matrices.clone()
}

/// The plan of one device.
fn whole(matrices: &[Matrix]) -> Plan {
    Plan::new(matrices, &[all_tiles(matrices)]).expect("a plan")
}

fn plan(model: &Model) -> Plan {
    whole(&matrices(model))
}

fn lowered(model: &Model) -> Verified<Program> {
    let target = Gpu::by_name("h200").expect("a known target");
    let config = validate(neutral_config(&model.graph, &target), &model.graph, &target)
        .expect("the default is legal");
    let options = lower::Options { kv_capacity: 64 };
    lower::lower(&config, &model.graph, &target, options).expect("it lowers")
}

/// Memory as a target. Bytes that have not arrived are poison.
struct Memory {
    staging: Vec<u8>,
    matrices: Vec<Vec<u8>>,
    said: Vec<u32>,
    /// The latest watermark, for concurrent readers.
    watermark: Arc<AtomicU32>,
    /// Whether the device accepts copies.
    broken: bool,
}

impl Memory {
    fn new(plan: &Plan) -> Self {
        let matrices = plan.matrices.iter().map(|m| vec![0xa5; m.bytes() as usize]).collect();
        let staging = vec![0; plan.largest() * SLOTS];
        Self { staging, matrices, said: Vec::new(), watermark: Arc::default(), broken: false }
    }
}

// SAFETY: the vector is the target's own and is never resized.
unsafe impl Target for Memory {
    fn staging(&self, bytes: usize) -> *mut u8 {
        assert!(bytes <= self.staging.len());
        self.staging.as_ptr().cast_mut()
    }

    fn enter(&mut self) -> Result<(), HostError> {
        Ok(())
    }

    fn copy(
        &mut self,
        matrix: usize,
        (_, offset): (usize, u64),
        from: &Staging,
        bytes: usize,
    ) -> Result<(), HostError> {
        if self.broken {
            return Err(HostError::Driver { call: "copy", message: "no".into() });
        }
        // SAFETY: packed, and no thread packs into it before it is given back.
        let from = unsafe { std::slice::from_raw_parts(from.pointer(), bytes) };
        self.matrices[matrix][offset as usize..][..bytes].copy_from_slice(from);
        Ok(())
    }

    fn watermark(&mut self, value: u32, _slot: usize) -> Result<(), HostError> {
        self.said.push(value);
        self.watermark.store(value, Ordering::Release);
        Ok(())
    }

    fn copied(&mut self, _slot: usize) -> Result<bool, HostError> {
        Ok(true)
    }
}

fn land(
    model: &Model,
    read_by: ReadBy,
    limit: Duration,
    through: Through<'_>,
) -> WeightStream<Memory> {
    let plan = Arc::new(plan(model));
    let target = Memory::new(&plan);
    WeightStream::start(plan, &*model.weights, Streaming { read_by, limit }, target, through)
        .expect("it starts")
}

/// Waits for the end; fails if it exceeds its limit.
fn ended(weight_stream: &mut WeightStream<Memory>, at_most: Duration) -> (Memory, usize) {
    let start = Instant::now();
    while weight_stream.under_way() {
        assert!(start.elapsed() < at_most, "still under way after {at_most:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    weight_stream.end().expect("its thread ends")
}

#[test]
fn every_source_lands_what_the_kernel_would_have_packed() {
    for name in GOLDEN {
        let model = golden(name);
        let matrices = matrices(&model);
        for read_by in [ReadBy::Auto, ReadBy::IoUring, ReadBy::Pread] {
            let mut weight_stream = land(&model, read_by, Duration::from_secs(20), &|s| s);
            let (memory, next) = ended(&mut weight_stream, Duration::from_secs(60));
            assert!(weight_stream.failure().is_none(), "{name}: {:?}", weight_stream.failure());
            assert_eq!(next, plan(&model).pieces.len());
            let report = weight_stream.report();
            eprintln!("{name}: {read_by:?}: {} {:?}", report.source, report.fallback);
            for (index, matrix) in matrices.iter().enumerate() {
                let expected = packed_by_definition(matrix, &*model.weights);
                assert!(memory.matrices[index] == expected, "{name}, {}, {read_by:?}", matrix.name);
            }
            let plan = plan(&model);
            let stored: u64 = plan.pieces.iter().map(|piece| plan.stored_bytes(piece)).sum();
            assert_eq!(report.bytes, stored);
            let packed: u64 = matrices.iter().map(Matrix::bytes).sum();
            assert_eq!(weight_stream.packed().load(Ordering::Relaxed), packed);
            assert_order(&plan, &memory.said);
        }
    }
}

/// Makes the operating system refuse io_uring to this thread and those that it starts from now on, as a container's profile does.
fn refuse_io_uring() {
    let word = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let errno = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let mut filter = [
        word(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0), // the call's number
        word(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_io_uring_setup as u32),
        word(libc::BPF_RET | libc::BPF_K, 0, 0, errno),
        word(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    let mode = libc::c_ulong::from(libc::SECCOMP_MODE_FILTER);
    // SAFETY: both calls concern this thread; `program` and its filter outlive them, and the kernel copies what it needs.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program) == 0
    };
    assert!(done, "no filter for system calls: {}", std::io::Error::last_os_error());
}

/// If io_uring is refused, threads read the same bytes, and the report gives the reason.
#[test]
fn where_io_uring_is_refused_threads_read_instead() {
    let refused = std::thread::spawn(|| {
        refuse_io_uring();
        let model = golden("llama3-rope-bf16");
        let mut weight_stream = land(&model, ReadBy::IoUring, Duration::from_secs(20), &|s| s);
        let (memory, next) = ended(&mut weight_stream, Duration::from_secs(60));
        assert!(weight_stream.failure().is_none(), "{:?}", weight_stream.failure());
        assert_eq!(next, plan(&model).pieces.len());
        for (matrix, watermark) in matrices(&model).iter().zip(&memory.matrices) {
            assert!(*watermark == packed_by_definition(matrix, &*model.weights), "{}", matrix.name);
        }
        weight_stream.report()
    });
    let report = refused.join().expect("it lands");
    let why = report.fallback.expect("it says why");
    assert!(why.starts_with("io_uring refused: ") && why.contains("os error 1"), "{why}");
    assert!(!report.source.starts_with("io_uring"), "{}", report.source);
}

/// `watermark` counts up, piece after piece, and ends with "all".
fn assert_order(plan: &Plan, said: &[u32]) {
    let mut expected: Vec<u32> = plan.pieces.iter().map(|piece| piece.end).collect();
    *expected.last_mut().expect("a piece") = abi::WATERMARK_ALL;
    assert_eq!(said, expected);
    assert!(said.is_sorted());
}

#[test]
fn a_plan_names_every_unit_once_and_in_the_order_of_a_step() {
    for name in GOLDEN {
        let model = golden(name);
        let matrices = matrices(&model);
        let plan = whole(&matrices);
        let mut units = 0;
        for (index, matrix) in matrices.iter().enumerate() {
            assert_eq!(plan.starts[index], units, "{}", matrix.name);
            let of: Vec<&Piece> = plan.pieces.iter().filter(|p| p.matrix == index).collect();
            assert_eq!(of.iter().map(|p| p.tiles).sum::<u32>(), matrix.tiles());
            assert!(of.windows(2).all(|pair| pair[0].tile0 + pair[0].tiles == pair[1].tile0));
            units += matrix.units() as u32;
            assert_eq!(of.last().expect("a piece").end, units);
        }
        assert!(plan.pieces.is_sorted_by_key(|p| (p.matrix, p.tile0)), "matrix after matrix");
        assert_eq!(matrices[0].name, "embed", "read before anything is multiplied");
    }
}

/// 65280 is the largest bf16 that is an f16, 65536 the next.
#[test]
fn a_bf16_that_is_no_f16_is_refused_where_it_would_be_one() {
    let map = RowMap { parts: vec![(Some(TensorId(0)), 16)], interleaved: false };
    let packed = |format, value: f32| {
        let matrix = Matrix { name: "down".into(), map: map.clone(), cols: 64, format, experts: 1 };
        let mut row = [0; 128];
        row[66..68].copy_from_slice(&half::bf16::from_f32(value).to_le_bytes());
        let rows = |_, at| if at == 13 { &row[..] } else { &[0; 128][..] };
        let mut out = vec![0; matrix.bytes() as usize];
        pack(&matrix, 0, rows, &mut out).map_err(|error| error.to_string())
    };
    assert_eq!(packed(Format::Bf16AsF16, -65280.0), Ok(()));
    let error = packed(Format::Bf16AsF16, -65536.0).expect_err("it is infinite");
    assert!(error.starts_with("down: has an element beyond 65504"), "{error}");
    assert_eq!(packed(Format::Bf16, -65536.0), Ok(()));
}

/// Matrices whose rows and columns fill no tile and no unit, in both kinds of map.
#[test]
fn odd_shapes_are_padded_as_the_kernel_pads_them() {
    struct Bytes(Vec<Vec<u8>>);
    impl ir::Weights for Bytes {
        fn bytes(&self, tensor: TensorId) -> &[u8] {
            &self.0[tensor.index()]
        }
    }
    for (dtype, cols) in [(DType::F32, 37), (DType::F16, 70), (DType::Bf16, 33), (DType::Bf16, 64)]
    {
        let row = cols as usize * dtype.bytes();
        let tensor = |rows: u32, seed: u8| -> Vec<u8> {
            (0..rows * row as u32)
                .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8 ^ seed)
                .collect()
        };
        let weights = Bytes(vec![tensor(24, 1), tensor(24, 2), tensor(19, 3), tensor(19, 4)]);
        let maps = [
            RowMap {
                parts: vec![(Some(TensorId(0)), 24), (Some(TensorId(1)), 24)],
                interleaved: true,
            },
            RowMap {
                parts: vec![(Some(TensorId(0)), 24), (None, 8), (Some(TensorId(2)), 19)],
                interleaved: false,
            },
            RowMap {
                parts: vec![(Some(TensorId(2)), 19), (Some(TensorId(3)), 19)],
                interleaved: true,
            },
        ];
        for map in maps {
            let matrix = Matrix {
                name: "odd".into(),
                map,
                cols,
                format: Format::of(dtype, dtype),
                experts: 1,
            };
            let plan = whole(std::slice::from_ref(&matrix));
            let mut packed = vec![0xa5; matrix.bytes() as usize];
            for piece in &plan.pieces {
                let at = piece.places[0].1 as usize;
                let out = &mut packed[at..][..plan.packed_bytes(piece)];
                let source = |tensor: TensorId, index: u32| {
                    &weights.0[tensor.index()][index as usize * row..][..row]
                };
                pack(&matrix, piece.tile0, source, out).expect("it is packed");
            }
            let expected = packed_by_definition(&matrix, &weights);
            assert!(packed == expected, "{dtype:?} of {cols} columns, {:?}", matrix.map);
            // The comparison detects a difference: the same bytes of another tile.
            let mut other = vec![0; matrix.units_per_tile() as usize * 512];
            let source = |t: TensorId, i| &weights.0[t.index()][i as usize * row..][..row];
            pack(&matrix, 1, source, &mut other).expect("it is packed");
            assert!(other != expected[..other.len()], "{dtype:?} of {cols} columns");
        }
    }
}

#[test]
fn pieces_of_large_matrices_are_cut_at_tiles() {
    let map = RowMap {
        parts: vec![(Some(TensorId(0)), 4096), (Some(TensorId(1)), 4096)],
        interleaved: true,
    };
    let matrix =
        Matrix { name: "gate_up".into(), map, cols: 2048, format: Format::Bf16, experts: 1 };
    let plan = whole(&[matrix]);
    assert_eq!(plan.pieces.len(), 8);
    let read = |tensor, first| TensorRows { tensor: TensorId(tensor), first, rows: 512 };
    assert_eq!(plan.pieces[3].reads, [read(0, 1536), read(1, 1536)]);
    assert_eq!((plan.pieces[3].tile0, plan.pieces[3].tiles), (384, 128));
    assert_eq!(plan.watermark_behind(3), 4 * 128 * 64);
    assert_eq!(plan.watermark_behind(7), abi::WATERMARK_ALL);
}

#[test]
fn each_device_gets_its_tiles_and_no_tile_is_read_twice() {
    let map = RowMap::single(TensorId(0), 64);
    let matrix = Matrix { name: "o".into(), map, cols: 64, format: Format::Bf16, experts: 1 };
    let tiles: [Tiles; 2] = [vec![vec![0..3, 5..6]], vec![vec![2..8]]];
    let plan = Plan::new(&[matrix], &tiles).expect("a plan");
    let bytes = plan.packed_bytes(&plan.pieces[1]) as u64;
    let found = plan.pieces.iter().map(|piece| {
        let places = piece.places.iter().map(|(device, at)| (*device, at / bytes));
        (piece.tile0, piece.tiles, places.collect::<Vec<_>>())
    });
    let expected = [
        (0, 2, vec![(0, 0)]),
        (2, 1, vec![(0, 2), (1, 0)]),
        (3, 2, vec![(1, 1)]),
        (5, 1, vec![(0, 3), (1, 3)]),
        (6, 2, vec![(1, 4)]),
    ];
    assert_eq!(found.collect::<Vec<_>>(), expected);
}

/// After a failure the reason is known, the device was notified, what arrived before is there, and it took no longer than it may.
fn assert_failed(
    name: &str,
    weight_stream: &mut WeightStream<Memory>,
    words: &str,
    at_most: Duration,
) -> usize {
    let (memory, next) = ended(weight_stream, at_most);
    let failure = weight_stream.failure().expect("it failed").to_string();
    eprintln!("{name}: {next} pieces, {failure}");
    assert!(failure.contains(words), "{name}: {failure}");
    assert_eq!(memory.said.last(), Some(&abi::WATERMARK_ABANDONED), "{name}");
    assert_eq!(memory.said.len(), next + 1, "{name}: what was said is there, and no more");
    assert!(!memory.said.contains(&abi::WATERMARK_ALL));
    next
}

fn scripted(mishap: (usize, Mishap)) -> impl Fn(Box<dyn Source>) -> Box<dyn Source> {
    move |inner| {
        Box::new(Scripted {
            inner,
            asked: Duration::ZERO,
            delay: Duration::ZERO,
            mishap: Some(mishap),
        })
    }
}

#[test]
fn a_read_error_is_reported_and_what_landed_before_it_is_there() {
    let model = golden("llama3-rope-bf16");
    for read_by in [ReadBy::IoUring, ReadBy::Pread] {
        let mut weight_stream = land(&model, read_by, LIMIT, &scripted((4, Mishap::Eio)));
        let packed = weight_stream.packed();
        let next =
            assert_failed("eio", &mut weight_stream, "a dead disk: Input/output error", LIMIT);
        let plan = plan(&model);
        let here = plan.pieces[..next].iter().map(|piece| plan.packed_bytes(piece));
        assert_eq!(packed.load(Ordering::Relaxed), here.sum::<usize>() as u64);
        assert!(next <= 4, "piece 4 never came");
    }
}

#[test]
fn a_disk_that_does_not_answer_is_given_up_in_time() {
    let model = golden("llama-tied-f32");
    let start = Instant::now();
    let mut silent = land(&model, ReadBy::Pread, LIMIT, &scripted((2, Mishap::Silent)));
    assert_failed("silent", &mut silent, "does not answer", LIMIT * 2);
    assert!(start.elapsed() >= LIMIT);
    let start = Instant::now();
    let mut hangs = land(&model, ReadBy::IoUring, LIMIT, &scripted((2, Mishap::Hangs)));
    assert_failed("hangs", &mut hangs, "whoever reads them hangs", LIMIT * 4);
    assert!(start.elapsed() >= LIMIT * 2);
    // Nothing arrived at all.
    let mut dead = land(&model, ReadBy::IoUring, LIMIT, &scripted((0, Mishap::Silent)));
    assert_eq!(assert_failed("dead", &mut dead, "does not answer", LIMIT * 2), 0);
}

#[test]
fn a_device_that_takes_no_copy_ends_it() {
    let model = golden("llama-tied-f32");
    let plan = Arc::new(plan(&model));
    let target = Memory { broken: true, ..Memory::new(&plan) };
    let streaming = Streaming { read_by: ReadBy::Auto, limit: LIMIT };
    let mut weight_stream =
        WeightStream::start(plan, &*model.weights, streaming, target, &|s| s).expect("it starts");
    assert_eq!(assert_failed("broken", &mut weight_stream, "copy failed: no", LIMIT), 0);
}

#[test]
fn a_stopped_stream_ends_at_once() {
    let model = golden("llama-tied-f32");
    let through = |inner| -> Box<dyn Source> {
        Box::new(Scripted {
            inner,
            asked: Duration::ZERO,
            delay: Duration::from_millis(50),
            mishap: None,
        })
    };
    let mut weight_stream = land(&model, ReadBy::Auto, Duration::from_secs(60), &through);
    let start = Instant::now();
    let (_, next) = weight_stream.end().expect("its thread ends");
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    assert!(next < plan(&model).pieces.len());
    assert!(
        weight_stream.failure().is_some_and(|f| f.to_string().contains("still weight streaming"))
    );
}

/// The file of a copied model.
fn weights_file(dir: &Path) -> PathBuf {
    dir.join("model.safetensors")
}

#[test]
fn files_that_change_meanwhile_are_noticed() {
    for read_by in [ReadBy::IoUring, ReadBy::Pread] {
        let folder = tempfile::tempdir().expect("a folder");
        let model = copied("llama3-rope-bf16", folder.path());
        let file = weights_file(folder.path());
        let began = AtomicBool::new(false);
        // Spoils the file once it has been opened, before the first read.
        let spoiled = |spoil: &dyn Fn(&std::fs::File)| {
            let through = |inner: Box<dyn Source>| -> Box<dyn Source> {
                std::thread::sleep(Duration::from_millis(20)); // the clock of file times is coarse
                spoil(&std::fs::OpenOptions::new().write(true).open(&file).expect("the file"));
                began.store(true, Ordering::Relaxed);
                inner
            };
            land(&model, read_by, LIMIT, &through)
        };
        let bytes = std::fs::metadata(&file).expect("the file").len();
        let mut weight_stream = spoiled(&|file| {
            std::os::unix::fs::FileExt::write_all_at(file, &[1], bytes - 1).expect("a byte");
        });
        assert_failed("changed", &mut weight_stream, "was changed while it was read", LIMIT);
        let mut weight_stream = spoiled(&|file| file.set_len(bytes / 2).expect("a shorter file"));
        let (_, next) = ended(&mut weight_stream, LIMIT);
        let failure = weight_stream.failure().expect("it failed").to_string();
        eprintln!("truncated: {next} pieces, {failure}");
        assert!(failure.contains("was cut from") || failure.contains("bytes early"), "{failure}");
        assert!(began.load(Ordering::Relaxed));
        // A file that was short from the beginning is refused at the start; the mapping of the whole one is not touched.
        let plan = Arc::new(plan(&model));
        let target = Memory::new(&plan);
        let short = WeightStream::start(
            plan,
            &*model.weights,
            Streaming { read_by, limit: LIMIT },
            target,
            &|s| s,
        );
        let short = short.err().expect("it does not start").to_string();
        assert!(short.contains("bytes early"), "{short}");
    }
}

#[test]
fn weights_that_are_in_no_file_are_refused() {
    let model = model::preset("toy-2l").expect("a preset");
    let plan = Arc::new(plan(&model));
    let target = Memory::new(&plan);
    let streaming = Streaming::default();
    let refused = WeightStream::start(plan, &*model.weights, streaming, target, &|s| s).err();
    assert!(refused.is_some_and(|e| e.to_string().contains("export the model first")));
}

/// Progress of a command on the reference VM.
#[derive(Debug, PartialEq, Eq)]
enum Ended {
    Done(Vec<u32>),
    Fault(Option<sessions::Why>),
}

/// Runs one command under the scheduler while weights stream in: a turn continues to the first layer that has not arrived. Returns the number of waits.
fn run_while_streaming(
    model: &Model,
    weight_stream: &WeightStream<Memory>,
    watermark: &AtomicU32,
) -> (Ended, u32) {
    use sessions::{Outcome, Priority, Scheduler};
    let program = lowered(model);
    let mut scheduler = Scheduler::new(4);
    let session = scheduler.open(Priority::Normal, 100).expect("a place");
    scheduler.submit(session).expect("it is in line");
    let plan = plan(model);
    let needs: Vec<u32> = plan.starts.iter().copied().skip(1).chain([abi::WATERMARK_ALL]).collect();
    let here = |layer: usize| {
        let watermark = watermark.load(Ordering::Acquire);
        watermark != abi::WATERMARK_ABANDONED && watermark >= needs[layer]
    };
    let (mut layer, mut waits) = (0, 0);
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        assert!(Instant::now() < deadline, "it waits for layer {layer}");
        if let Some(turn) = scheduler.next(8) {
            while layer < needs.len() && here(layer) {
                layer += 1;
            }
            if layer < needs.len() {
                scheduler.give_back(turn, 0, Outcome::WaitIo).expect("it waits");
                assert_eq!(scheduler.ring().state(session.place()), abi::EntryState::WaitIo);
                waits += 1;
                continue;
            }
            let mut machine =
                reference_vm::machine::Machine::new(&program, &model.graph, &*model.weights)
                    .expect("a machine");
            let order = reference_vm::Order::Waves;
            let _ = machine.run(&[1, 2, 3], order).expect("it runs");
            let run = machine.greedy(4, &[], order).expect("it runs").finished();
            scheduler.give_back(turn, 8, Outcome::Done).expect("it is done");
            assert_eq!(scheduler.ring().state(session.place()), abi::EntryState::Done);
            return (Ended::Done(run.expect("it finished").tokens), waits);
        } else if here(layer) {
            scheduler.returned(session).expect("it waited");
        } else if weight_stream.failure().is_some() {
            scheduler.lost(session).expect("it waited");
            assert_eq!(scheduler.ring().state(session.place()), abi::EntryState::Fault);
            return (Ended::Fault(scheduler.why(session)), waits);
        } else {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

#[test]
fn a_command_on_the_reference_vm_waits_for_each_layer() {
    let model = golden("llama3-rope-bf16");
    let start = |mishap| {
        let plan = Arc::new(plan(&model));
        let target = Memory::new(&plan);
        let watermark = target.watermark.clone();
        let through = move |inner| -> Box<dyn Source> {
            Box::new(Scripted {
                inner,
                asked: Duration::ZERO,
                delay: Duration::from_millis(5),
                mishap,
            })
        };
        let streaming = Streaming { read_by: ReadBy::IoUring, limit: LIMIT };
        let weight_stream = WeightStream::start(plan, &*model.weights, streaming, target, &through);
        (weight_stream.expect("it starts"), watermark)
    };
    let (weight_stream, watermark) = start(Some((5, Mishap::Eio)));
    let (ended, waits) = run_while_streaming(&model, &weight_stream, &watermark);
    assert_eq!(ended, Ended::Fault(Some(sessions::Why::Io)));
    assert!(waits > 0);
    let (weight_stream, watermark) = start(None);
    let (ended, waits) = run_while_streaming(&model, &weight_stream, &watermark);
    eprintln!("waited {waits} times, {ended:?}");
    assert!(waits > 2, "layer by layer: {waits}");
    assert!(matches!(&ended, Ended::Done(tokens) if tokens.len() == 4), "{ended:?}");
}
