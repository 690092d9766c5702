//! reference-vm
