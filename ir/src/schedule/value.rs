//! Knob values: numbers or names.

use std::fmt;

use serde_json::Value as Json;

/// A knob's value, of either type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Value {
    /// A number.
    Number(u32),
    /// One of a list of names.
    Name(&'static str),
}

impl Value {
    /// The value as JSON.
    #[must_use]
    pub fn to_json(self) -> Json {
        match self {
            Self::Number(number) => Json::from(number),
            Self::Name(name) => Json::from(name),
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Name(name) => f.write_str(name),
        }
    }
}

/// The values that the knob table allows, before any graph or target narrows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Domain {
    /// One of these.
    Choices(&'static [Value]),
    /// `min`, `min + step`, up to `max`.
    Range {
        /// Least value.
        min: u32,
        /// Greatest value.
        max: u32,
        /// Distance between values.
        step: u32,
    },
}

impl Domain {
    /// Whether the value is one of them.
    #[must_use]
    pub fn contains(self, value: Value) -> bool {
        match (self, value) {
            (Self::Choices(choices), value) => choices.contains(&value),
            (Self::Range { min, max, step }, Value::Number(n)) => {
                (min..=max).contains(&n) && (n - min).is_multiple_of(step)
            }
            (Self::Range { .. }, Value::Name(_)) => false,
        }
    }

    /// Every value, in table order.
    #[must_use]
    pub fn values(self) -> Vec<Value> {
        match self {
            Self::Choices(choices) => choices.to_vec(),
            Self::Range { min, max, step } => {
                (min..=max).step_by(step as usize).map(Value::Number).collect()
            }
        }
    }

    /// Whether the values are names rather than numbers.
    #[must_use]
    pub fn is_names(self) -> bool {
        matches!(self, Self::Choices([Value::Name(_), ..]))
    }
}

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Choices(choices) => {
                for (i, choice) in choices.iter().enumerate() {
                    write!(f, "{}{choice}", if i > 0 { ", " } else { "" })?;
                }
                Ok(())
            }
            Self::Range { min, max, step } => write!(f, "{min} to {max} in steps of {step}"),
        }
    }
}

/// A Rust type of knob values.
pub(super) trait KnobType: Copy {
    fn to_value(self) -> Value;
    fn from_value(value: Value) -> Option<Self>;
}

impl KnobType for u32 {
    fn to_value(self) -> Value {
        Value::Number(self)
    }

    fn from_value(value: Value) -> Option<Self> {
        match value {
            Value::Number(number) => Some(number),
            Value::Name(_) => None,
        }
    }
}

macro_rules! choice {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
        pub enum $name { $($(#[$vdoc])* #[serde(rename = $text)] $variant),+ }

        impl $name {
            /// Every value in table order.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];
            pub(super) const VALUES: &'static [Value] = &[$(Value::Name($text)),+];

            /// Its name in JSON and text.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }

        impl KnobType for $name {
            fn to_value(self) -> Value {
                Value::Name(self.name())
            }

            fn from_value(value: Value) -> Option<Self> {
                Self::ALL.iter().copied().find(|v| v.to_value() == value)
            }
        }
    };
}

choice! {
    /// How a phase's output is handed to the next.
    Handoff {
        /// Every producing task signals the phase's counter; each consumer waits for all of them.
        Counter = "counter",
        /// Each word carries its epoch; the consumer polls the data.
        FlagInData = "flag_in_data",
    }
}

choice! {
    /// Which phase reads the embedding row.
    EmbedGrouping {
        /// A phase of its own writes it to a buffer.
        Separate = "separate",
        /// The first layer reads the table itself.
        Qkv = "qkv",
    }
}

choice! {
    /// Which phase combines the attention partials.
    MergeGrouping {
        /// A phase of its own.
        Separate = "separate",
        /// Every worker of the output projection.
        OProj = "o_proj",
    }
}

choice! {
    /// How the blocks of a phase are dealt to the workers.
    SmAssignment {
        /// The remainder goes to the first workers.
        RoundRobin = "round_robin",
        /// The remainder goes to the workers after the one where the last phase stopped.
        Carry = "carry",
        /// The remainder goes to the workers with the fewest bytes so far; workers that ran attention get one block
        /// less of the next phase.
        ByteBalance = "byte_balance",
        /// The same; but the last workers attend, and of the phases before and after they get what the others cannot take
        /// without a larger share.
        AroundAttention = "around_attention",
    }
}

choice! {
    /// What the weight stream does to the L2 cache.
    Evict {
        /// The default policy.
        Normal = "normal",
        /// Weights are evicted first.
        First = "first",
    }
}
