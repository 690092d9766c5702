//! Reads typed fields from a JSON object and collects all errors.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::error::{Problem, shown};

/// Most token ids in a list.
const IDS_MAX: usize = 1024;

/// The value with which a field changes nothing. Null is one of any field.
#[derive(Clone, Copy)]
pub(crate) enum Neutral {
    /// Null or absent.
    Null,
    /// False.
    False,
    /// True.
    True,
    /// Zero, or an empty list.
    Zero,
    /// One.
    One,
}

impl Neutral {
    fn holds(self, value: &Value) -> bool {
        value.is_null()
            || match self {
                Self::Null => false,
                Self::False => value == &Value::Bool(false),
                Self::True => value == &Value::Bool(true),
                Self::Zero => {
                    value.as_f64() == Some(0.0) || value.as_array().is_some_and(Vec::is_empty)
                }
                Self::One => value.as_f64() == Some(1.0),
            }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::False => "false",
            Self::True => "true",
            Self::Zero => "0",
            Self::One => "1.0",
        }
    }
}

/// A JSON object being read; wrong fields are recorded, not fatal, so that one answer lists them all.
pub(crate) struct Fields<'a> {
    object: &'a Map<String, Value>,
    /// Prefix of field names in errors: empty, or `rope_scaling.`.
    prefix: String,
    problems: Vec<Problem>,
    /// Fields that were read.
    read: RefCell<BTreeSet<String>>,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(object: &'a Map<String, Value>, prefix: impl Into<String>) -> Self {
        Self { object, prefix: prefix.into(), problems: Vec::new(), read: RefCell::default() }
    }

    /// The name of a field with this object's prefix.
    pub(crate) fn prefixed(&self, field: &str) -> String {
        format!("{}{field}", self.prefix)
    }

    pub(crate) fn into_problems(self) -> Vec<Problem> {
        self.problems
    }

    /// The value of a field; `null` counts as absent.
    pub(crate) fn get(&self, field: &str) -> Option<&'a Value> {
        self.read.borrow_mut().insert(field.to_owned());
        self.object.get(field).filter(|value| !value.is_null())
    }

    /// Complains about each of these fields that was not read and has a value that changes the arithmetic.
    pub(crate) fn refuse_unread(&mut self, neutral: &[(&str, Neutral)]) {
        for (field, neutral) in neutral {
            let value = self.object.get(*field).filter(|value| !neutral.holds(value));
            if let Some(value) = value.filter(|_| !self.read.borrow().contains(*field)) {
                self.expected(field, value, neutral.name());
            }
        }
    }

    pub(crate) fn is_null(&self, field: &str) -> bool {
        self.object.get(field).is_some_and(Value::is_null)
    }

    pub(crate) fn complain(&mut self, field: &str, reason: impl Into<String>) {
        // A field may be read twice.
        let problem = Problem::new(self.prefixed(field), reason);
        if !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }

    pub(crate) fn adopt(&mut self, problems: Vec<Problem>) {
        self.problems.extend(problems);
    }

    pub(crate) fn complained(&self, field: &str) -> bool {
        self.problems.iter().any(|problem| problem.subject == field)
    }

    fn typed<T>(
        &mut self,
        field: &str,
        supported: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Option<T> {
        let value = self.get(field)?;
        let found = read(value);
        if found.is_none() {
            self.expected(field, value, supported);
        }
        found
    }

    pub(crate) fn whole(&mut self, field: &str) -> Option<u32> {
        self.typed(field, "a whole number from 0 to 4294967295", as_u32)
    }

    /// A required whole number. After an error it is 0.
    pub(crate) fn required(&mut self, field: &str) -> u32 {
        if self.get(field).is_none() {
            self.complain(field, "is missing; it must be a whole number");
        }
        self.whole(field).unwrap_or(0)
    }

    pub(crate) fn number(&mut self, field: &str) -> Option<f64> {
        self.typed(field, "a number", Value::as_f64)
    }

    /// A required number. After an error it is 1.
    pub(crate) fn required_number(&mut self, field: &str) -> f64 {
        if self.get(field).is_none() {
            self.complain(field, "is missing; it must be a number");
        }
        self.number(field).unwrap_or(1.0)
    }

    /// A boolean; absent is `false`.
    pub(crate) fn flag(&mut self, field: &str) -> bool {
        self.typed(field, "true or false", Value::as_bool).unwrap_or(false)
    }

    pub(crate) fn text(&mut self, field: &str) -> Option<&'a str> {
        self.typed(field, "a string", Value::as_str)
    }

    pub(crate) fn object(&mut self, field: &str) -> Option<&'a Map<String, Value>> {
        self.typed(field, "an object or null", Value::as_object)
    }

    /// A list of numbers; absent is empty.
    pub(crate) fn numbers(&mut self, field: &str) -> Vec<f64> {
        let list = |value: &Value| value.as_array()?.iter().map(Value::as_f64).collect();
        self.typed(field, "a list of numbers", list).unwrap_or_default()
    }

    /// Token ids: one, a list, or none.
    pub(crate) fn ids(&mut self, field: &str) -> Vec<u32> {
        let Some(value) = self.get(field) else { return Vec::new() };
        let found: Option<Vec<u32>> = match value.as_array() {
            // The limit keeps the search for repeated ids short.
            Some(list) => list.iter().take(IDS_MAX + 1).map(as_u32).collect(),
            None => as_u32(value).map(|id| vec![id]),
        };
        if found.as_ref().is_none_or(|ids| ids.len() > IDS_MAX) {
            let supported = format!("a token id, a list of up to {IDS_MAX} token ids, or null");
            self.expected(field, value, &supported);
        }
        found.unwrap_or_default()
    }

    pub(crate) fn expected(&mut self, field: &str, value: &Value, supported: &str) {
        self.complain(field, format!("is {}; supported: {supported}", shown(value)));
    }
}

/// A whole number, also when it is spelled `8192.0`.
fn as_u32(value: &Value) -> Option<u32> {
    if let Some(whole) = value.as_u64() {
        return u32::try_from(whole).ok();
    }
    let real = value.as_f64()?;
    let fits = real.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&real);
    fits.then_some(real as u32)
}
