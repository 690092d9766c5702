//! vm-host
