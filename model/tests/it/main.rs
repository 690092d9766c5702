//! What the crate promises, checked on the golden folders and on broken copies of them.

mod config;
mod export;
mod folder;
mod golden;
mod mutilated;
mod preset;
mod refusals;
mod rope;
mod text;

/// As `amk` has it: the memory of chat templates is limited.
#[global_allocator]
static ALLOCATOR: model::Guarded<std::alloc::System> = model::Guarded(std::alloc::System);
