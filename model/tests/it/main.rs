//! Tests of the crate's promises on the golden folders and on broken copies of them.

mod config;
mod experts;
mod export;
mod families;
mod folder;
mod golden;
mod hostile;
mod mutilated;
mod nf4;
mod preset;
mod quantise;
mod quantised;
mod refusals;
mod rope;
mod spellings;
mod text;
mod unseen;
