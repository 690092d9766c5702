//! vm-device
