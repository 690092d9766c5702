//! Ctrl-C in the middle of a command.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::{Ran, command, folder, ran};

/// The longest wait for a command to come as far as it should.
const LIMIT: Duration = Duration::from_secs(60);

/// Waits until `there` holds, sends Ctrl-C and returns the answer. The command begins with this disposition of the signal,
/// whatever that of the tests is: those in the background of a script ignore it.
fn interrupted(mut command: Command, begins: libc::sighandler_t, there: impl Fn() -> bool) -> Ran {
    // SAFETY: it only sets the disposition of a signal, which is allowed between fork and exec.
    unsafe {
        command.pre_exec(move || {
            libc::signal(libc::SIGINT, begins);
            Ok(())
        });
    }
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while !there() {
        assert!(begun.elapsed() < LIMIT && child.try_wait().unwrap().is_none(), "it never began");
        std::thread::sleep(Duration::from_millis(5));
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    ran(child.wait_with_output().unwrap())
}

#[test]
fn an_interrupted_command_says_so_and_leaves_no_half_written_folder() {
    let dir = folder();
    // A model that takes seconds to write, and is interrupted in the first of them.
    let here = || std::fs::read_dir(dir.path()).unwrap().count();
    let export = command(dir.path(), &["export", "--model", "qwen3-0.6b", "--out", "whole"]);
    interrupted(export, libc::SIG_DFL, || here() > 0).fails(130, &["interrupted"]);
    assert_eq!(here(), 0, "something is left of a folder that was never finished");
}

#[test]
fn a_command_in_the_background_of_a_script_does_not_hear_ctrl_c() {
    let dir = folder();
    let export = command(dir.path(), &["export", "--model", "toy-2l", "--out", "whole"]);
    interrupted(export, libc::SIG_IGN, || true).succeeds("amk.export.v1");
}
