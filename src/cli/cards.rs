//! How a GPU is named on the command line: by its number, as the driver counts them.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// Most GPUs of one machine.
const CARDS_MAX: u32 = 64;

/// The number of a GPU: `0`, or `cuda:0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CardNumber(pub(crate) u32);

impl fmt::Display for CardNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl FromStr for CardNumber {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let trimmed = text.trim();
        let number = trimmed.strip_prefix("cuda:").unwrap_or(trimmed).parse().ok();
        let number = number.filter(|&number| number < CARDS_MAX).map(Self);
        number.ok_or_else(|| {
            format!("{text:?} is no GPU: give its number, from 0 (0,1 or cuda:0,cuda:1)")
        })
    }
}

impl<'de> Deserialize<'de> for CardNumber {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        text.parse().map_err(serde::de::Error::custom)
    }
}

impl JsonSchema for CardNumber {
    fn schema_name() -> Cow<'static, str> {
        "CardNumber".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": ["integer", "string"],
            "minimum": 0,
            "maximum": CARDS_MAX - 1,
            "pattern": "^(cuda:)?[0-9]+$"
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_has_a_number() {
        for (text, number) in [("0", 0), ("cuda:3", 3), (" 1 ", 1)] {
            assert_eq!(text.parse(), Ok(CardNumber(number)));
        }
        for text in ["", "cuda", "cuda:", "-1", "64", "gpu:0", "1.5", "cpu"] {
            let refused = text.parse::<CardNumber>().unwrap_err();
            assert!(refused.contains("cuda:0,cuda:1"), "{refused}");
        }
        assert_eq!(serde_json::from_str::<CardNumber>("2").unwrap(), CardNumber(2));
        assert_eq!(serde_json::from_str::<CardNumber>("\"cuda:2\"").unwrap(), CardNumber(2));
    }
}
