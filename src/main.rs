//! The command line of `amk`; the implementation is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    amk::main()
}
