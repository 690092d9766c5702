//! Arguments of `rerun`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;

use super::{ConfigArgs, ModelArgs, SharingArgs};

/// One task of a program again, on the inputs that it had.
#[derive(Debug, Args)]
pub(crate) struct RerunArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) sharing: SharingArgs,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// A saved program (.amk or .amkp) instead of what a schedule lowers to.
    #[arg(long, value_name = "FILE", conflicts_with = "config")]
    pub(crate) program: Option<PathBuf>,
    /// The task: its worker and its index in the worker's queue, such as 17:3.
    #[arg(long, value_name = "WORKER:TASK")]
    pub(crate) task: TaskPlace,
    /// The position at which it runs. Default: the first.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub(crate) position: usize,
    /// What the gate's tokens are drawn with.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Token ids from position 0 on instead of the gate's, separated by commas.
    #[arg(long, value_delimiter = ',', value_name = "IDS")]
    pub(crate) tokens: Vec<u32>,
    /// Words to print: wrong ones first.
    #[arg(long, default_value_t = 8, value_name = "N")]
    pub(crate) words: usize,
}

/// A task by worker and index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TaskPlace {
    pub(crate) worker: u32,
    pub(crate) task: u32,
}

impl FromStr for TaskPlace {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once(':').and_then(|(worker, task)| {
            Some(Self { worker: worker.parse().ok()?, task: task.parse().ok()? })
        });
        parts.ok_or_else(|| "give the worker and the index of the task, such as 17:3".to_owned())
    }
}
