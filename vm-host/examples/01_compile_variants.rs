//! Compiles kernel variants and prints what the assembler says of them.
fn main() {
    let shapes = [
        (64, 4, false, [2048, 2048, 8192], 1 << 8),
        (128, 4, false, [4096, 4096, 14336], 1 << 8),
        (128, 2, true, [1024, 2048, 3072], 1 << 4 | 1 << 6 | 1 << 8),
        (64, 3, false, [576, 576, 1536], 1 << 3 | 1 << 6),
        (16, 2, false, [64, 64, 176], 1 << 1),
    ];
    for dtype in 0..3 {
        for (head_dim, group, qk_norm, widths, shares) in shapes {
            {
                let variant = vm_device::Variant {
                    dtype,
                    head_dim,
                    group,
                    qk_norm,
                    widths,
                    shares,
                    poll_sleep_ns: 0,
                    evict_first: true,
                    trace: false,
                };
                match vm_host::compile(&variant, "sm_90a", None) {
                    Ok(cubin) => {
                        for r in vm_host::resources(&cubin.log) {
                            if r.kernel == "amk_megakernel" {
                                println!("{variant:?} {r:?} {} bytes", cubin.image.len());
                            }
                        }
                    }
                    Err(error) => {
                        println!("{variant:?}: {error}");
                        return;
                    }
                }
            }
        }
    }
}
