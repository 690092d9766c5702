//! Panics: every panic is a bug in amk. Keeps the last panic message for the line that reports it.

use std::sync::Mutex;

/// The last panic message. Some panics are caught on the way: those that a hostile file causes in a library.
static PANIC: Mutex<String> = Mutex::new(String::new());

/// The last panic message as a line that asks the user to report the bug.
pub(crate) fn last_panic() -> String {
    let what = PANIC.lock().map(|what| what.clone()).unwrap_or_default();
    let version = env!("CARGO_PKG_VERSION");
    format!("this is a bug in amk {version}, please report it with the command: {what}")
}

/// Installs a hook that stores the panic message; the code that ends the process reports it.
pub(crate) fn install_panic_hook() {
    std::panic::set_hook(Box::new(|info| {
        let what = info
            .payload()
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| info.payload().downcast_ref::<String>().cloned())
            .unwrap_or_default();
        let place = info.location().map(ToString::to_string).unwrap_or_default();
        if let Ok(mut last) = PANIC.lock() {
            *last = format!("{} ({place})", what.replace('\n', " "));
        }
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Set in the child process, which runs this test again and panics.
    const CHILD: &str = "AMK_TEST_PANICS";

    #[test]
    fn a_panic_that_names_a_broken_pipe_is_a_bug_like_any_other() {
        if std::env::var_os(CHILD).is_some() {
            install_panic_hook();
            let caught = std::panic::catch_unwind(|| panic!("Broken pipe (os error 32)"));
            assert!(caught.is_err());
            std::process::exit(crate::failure::Exit::Bug.code());
        }
        let test = "bug::tests::a_panic_that_names_a_broken_pipe_is_a_bug_like_any_other";
        let child = std::process::Command::new(std::env::current_exe().expect("this test's file"))
            .args([test, "--exact", "--nocapture"])
            .env(CHILD, "1")
            .output()
            .expect("a process");
        assert_eq!(child.status.code(), Some(crate::failure::Exit::Bug.code()), "{child:?}");
    }
}
