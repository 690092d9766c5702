//! Writes the cubin of one variant to a file: `02_dump_cubin OUT [warps] [unroll]`. Read it with cuobjdump or nvdisasm.
fn main() {
    let mut arguments = std::env::args().skip(1);
    let Some(path) = arguments.next() else {
        eprintln!("usage: 02_dump_cubin OUT [warps] [unroll]");
        std::process::exit(2);
    };
    let mut number = |default| arguments.next().and_then(|a| a.parse().ok()).unwrap_or(default);
    let variant = vm_device::Variant {
        dtype: 2,
        mma: true,
        warps: number(8),
        unroll: number(4),
        poll_sleep_ns: 0,
        evict_first: true,
        kv_f32: true,
    };
    match vm_host::compile(&variant, "sm_90a", None) {
        Ok(cubin) => match std::fs::write(&path, &cubin.image) {
            Ok(()) => println!("{path}: {} bytes\n{}", cubin.image.len(), cubin.log),
            Err(error) => eprintln!("{path}: {error}"),
        },
        Err(error) => eprintln!("{error}"),
    }
}
