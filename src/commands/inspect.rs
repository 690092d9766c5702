//! `amk inspect kernel`: what the compiler made of a schedule's kernel, on a machine without a GPU. What runs: `live`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use crate::child_process;
use crate::cli::InspectKernelArgs;
use crate::context::Context;
use crate::failure::{Exit, Failure, Outcome};
use crate::schedule_choice::{Auto, Chosen, choose};
use crate::spinner::Spinner;
use crate::{files, report};

pub(crate) mod live;
mod sass;

/// How long nvdisasm may take; some seconds for the largest kernel.
const LIMIT: Duration = Duration::from_secs(120);

/// The kernel that runs steps.
const KERNEL: &str = "amk_megakernel";

pub(crate) fn kernel(args: &InspectKernelArgs) -> Outcome {
    let context = Context::of_shape(&args.model)?;
    let tokens = context.predicted_at();
    let Chosen { config, source } = choose(&context, &args.config, tokens, Auto::Reproducible)?;
    if let Some(sequences) = args.batch {
        context.check_batch(&config, sequences)?;
    }
    let variant = context.variant(&config.kernel, args.batch.unwrap_or(1));
    let arch = &context.target.arch;
    let working = Spinner::on(format!("compiling the kernel of {}", context.graph().name));
    let cache = vm_host::default_cache();
    let cubin = vm_host::compile(&variant, arch, cache.as_deref())?;
    if let Some(path) = &args.ptx {
        files::write_whole(path, vm_host::ptx(&variant, arch)?.as_bytes())?;
    }
    if let Some(path) = &args.cubin {
        files::write_whole(path, &cubin.image)?;
    }
    let text = disassemble(&cubin.image);
    let ops = text.as_ref().ok().map(|text| sass::ops(text, KERNEL, args.lines));
    drop(working);
    match (&text, &args.sass) {
        (Ok(text), Some(path)) => files::write_whole(path, text.as_bytes())?,
        (Err(why), Some(_)) => return Err(Failure::missing(format!("--sass: {why}"))),
        (_, None) => {}
    }
    let kernels = vm_host::resources(&cubin.log);
    for of in &kernels {
        let (name, registers, spills) = (&of.kernel, of.registers, of.spills);
        report::say(&format!("{name}: {registers} registers, {spills} bytes of spills"));
    }
    let row = |op: &sass::Op| {
        let line = op.lines.first().map_or("", |line| line.source.as_str());
        (op.op.clone(), format!("{:>6} instructions, most in {line}", op.instructions))
    };
    report::table(&ops.iter().flatten().map(row).collect::<Vec<_>>());
    if let Err(why) = &text {
        report::say(&format!("no instructions: {why}"));
    }
    let resources = kernels.iter().map(|of| {
        json!({"kernel": of.kernel, "registers": of.registers, "spills": of.spills, "stack": of.stack})
    });
    let written: Vec<&PathBuf> =
        [&args.cubin, &args.ptx, &args.sass].into_iter().flatten().collect();
    report::document(&json!({
        "schema": "amk.inspect_kernel.v1",
        "model": context.graph().name,
        "target": context.target.name,
        "arch": arch,
        "kernel_id": cubin.kernel_id,
        "options": vm_host::options(&variant, arch),
        "schedule_source": source,
        "kernels": resources.collect::<Vec<Value>>(),
        "ops": ops,
        "not_disassembled": text.err(),
        "files": written,
    }))?;
    Ok(Exit::Yes)
}

/// The machine code as text with the source lines of each instruction, or why there is none.
fn disassemble(image: &[u8]) -> Result<String, String> {
    let program = vm_host::cuda_tool("nvdisasm").ok_or_else(|| {
        "there is no nvdisasm: pip install nvidia-cuda-nvdisasm, or put it into PATH".to_owned()
    })?;
    let folder = std::env::temp_dir().join(format!("amk-inspect-{}", std::process::id()));
    let made = std::fs::create_dir_all(&folder).map_err(|error| error.to_string());
    let text = made.and_then(|()| run(&program, &folder.join("kernel.cubin"), image));
    // What is left is in the folder for temporary files.
    let _ = std::fs::remove_dir_all(&folder);
    text
}

fn run(program: &PathBuf, file: &Path, image: &[u8]) -> Result<String, String> {
    std::fs::write(file, image).map_err(|error| format!("{}: {error}", file.display()))?;
    let mut command = Command::new(program);
    command.args(["-c", "-gi"]).arg(file);
    let failed = |why: &str| format!("{}: {why}", program.display());
    let ended =
        child_process::run(command, "", LIMIT).map_err(|error| failed(&error.to_string()))?;
    if ended.status.success() && ended.out.contains(KERNEL) {
        return Ok(ended.out);
    }
    Err(failed(ended.last_line()))
}
