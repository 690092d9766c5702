//! The protocols of docs/explanation/protocol.md, each as it is and with deliberate bugs.
//!
//! A file a protocol. What a function does on the device is spelled here by its orders; the comment names the function.

pub mod attend;
pub mod counter;
pub mod host;
pub mod payload;
pub mod stages;
pub mod switch;
pub mod transitive;
pub mod trap;
pub mod weight_stream;

use super::Model;

/// A model and what exploring it must find.
pub struct Case {
    /// Such as `counter: missing release`.
    pub name: String,
    /// The protocol.
    pub model: Model,
    /// What the counter-example must say; `None` if there must be none.
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

/// Appends ops unless a bug leaves them out.
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
