//! Writes the cubin of one variant to a file: `02_dump_cubin OUT [head_dim] [group] [trace] [qk_norm]`. Read it with cuobjdump or nvdisasm.
fn main() {
    let mut arguments = std::env::args().skip(1);
    let Some(path) = arguments.next() else {
        eprintln!("usage: 02_dump_cubin OUT [head_dim] [group] [trace] [qk_norm]");
        std::process::exit(2);
    };
    let mut number = |default| arguments.next().and_then(|a| a.parse().ok()).unwrap_or(default);
    let variant = vm_device::Variant {
        dtype: 2,
        head_dim: number(64),
        group: number(4),
        trace: number(0) != 0,
        qk_norm: number(0) != 0,
        widths: [2048, 2048, 8192],
        shares: 1 << 8,
        poll_sleep_ns: 0,
        evict_first: true,
    };
    match vm_host::compile(&variant, "sm_90a", None) {
        Ok(cubin) => match std::fs::write(&path, &cubin.image) {
            Ok(()) => println!("{path}: {} bytes\n{}", cubin.image.len(), cubin.log),
            Err(error) => eprintln!("{path}: {error}"),
        },
        Err(error) => eprintln!("{error}"),
    }
}
