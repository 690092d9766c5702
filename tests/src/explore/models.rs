//! The protocols of docs/explanation/protocol.md, each without bugs and with deliberate ones.
//!
//! One file per protocol. Each device function is represented by its memory operations and orders; a comment names the
//! function.

pub mod attend;
pub mod counter;
pub mod exchange;
pub mod host;
pub mod payload;
pub mod stages;
pub mod switch;
pub mod transitive;
pub mod trap;
pub mod weight_stream;

use super::Model;

/// A model and the expected result.
pub struct Case {
    /// Name, such as `counter: missing release`.
    pub name: String,
    /// The protocol.
    pub model: Model,
    /// Expected text of the counter-example; `None` if there must be none.
    pub fails: Option<&'static str>,
}

impl Case {
    fn holds(name: impl Into<String>, model: Model) -> Self {
        Self { name: name.into(), model, fails: None }
    }

    fn fails(name: impl Into<String>, model: Model, what: &'static str) -> Self {
        Self { name: name.into(), model, fails: Some(what) }
    }
}

/// Appends ops unless a bug omits them.
trait Unless<T> {
    fn unless(&mut self, left_out: bool, item: T);
}

impl<T> Unless<T> for Vec<T> {
    fn unless(&mut self, left_out: bool, item: T) {
        if !left_out {
            self.push(item);
        }
    }
}
