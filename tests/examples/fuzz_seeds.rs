//! Writes valid inputs of every fuzz target into `tests/fuzz/corpus/NAME/`, as seeds for libFuzzer.

use tests::fuzz::TARGETS;

fn main() -> std::io::Result<()> {
    for target in TARGETS {
        let folder = tests::root().join("tests/fuzz/corpus").join(target.name);
        std::fs::create_dir_all(&folder)?;
        for (index, seed) in (target.seeds)().iter().enumerate() {
            std::fs::write(folder.join(format!("seed-{index}")), seed)?;
        }
        println!("{}: {} seeds", target.name, (target.seeds)().len());
    }
    Ok(())
}
