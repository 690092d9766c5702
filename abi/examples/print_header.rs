//! Prints the generated C header.
fn main() {
    print!("{}", abi::c_header());
}
