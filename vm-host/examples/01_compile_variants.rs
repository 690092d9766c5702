//! Compiles kernel variants and prints what the assembler says of them.
fn main() {
    let shapes = [(64, 4, false), (128, 4, false), (128, 2, true), (64, 3, false), (16, 2, false)];
    for dtype in 0..3 {
        for (head_dim, group, qk_norm) in shapes {
            {
                let variant = vm_device::Variant {
                    dtype,
                    head_dim,
                    group,
                    qk_norm,
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
