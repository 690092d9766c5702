//! Compiles kernel variants and prints what the assembler says of them.
fn main() {
    std::fs::write("/dev/null", "").unwrap();
    for dtype in 0..3 {
        for mma in [false, true] {
            for warps in [4, 8] {
                for unroll in [1, 2, 4] {
                    if dtype == 0 && mma {
                        continue;
                    }
                    let v = vm_device::Variant {
                        dtype,
                        mma,
                        warps,
                        unroll,
                        poll_sleep_ns: 20,
                        evict_first: true,
                        kv_f32: true,
                    };
                    let t = std::time::Instant::now();
                    match vm_host::compile(&v, "sm_90a", None) {
                        Ok(c) => {
                            for r in vm_host::resources(&c.log) {
                                if r.kernel == "amk_megakernel" {
                                    println!(
                                        "{v:?} {r:?} {} bytes {:?}",
                                        c.image.len(),
                                        t.elapsed()
                                    );
                                }
                            }
                        }
                        Err(e) => {
                            println!("{v:?}: {e}");
                            return;
                        }
                    }
                }
            }
        }
    }
}
