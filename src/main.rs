//! The command line of `amk`; what it does is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    amk::main()
}
