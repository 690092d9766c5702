//! One command per file.

pub(crate) mod bench;
pub(crate) mod bundle;
pub(crate) mod calibrate;
pub(crate) mod chat;
pub(crate) mod corpus_store;
pub(crate) mod diff;
pub(crate) mod doctor;
pub(crate) mod evaluate;
pub(crate) mod explain;
pub(crate) mod export;
pub(crate) mod fleet;
pub(crate) mod generate;
#[cfg(feature = "full")]
pub(crate) mod html;
pub(crate) mod inspect;
pub(crate) mod levers;
pub(crate) mod measured_grid;
pub(crate) mod migrate;
pub(crate) mod notes;
pub(crate) mod program;
pub(crate) mod propose;
pub(crate) mod provenance;
pub(crate) mod quantize;
pub(crate) mod replay;
pub(crate) mod rerun;
pub(crate) mod runs;
pub(crate) mod sanitize;
pub(crate) mod search_loop;
pub(crate) mod trace;

#[cfg(test)]
#[path = "../cli_tests/fields.rs"]
mod fields;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_that_need_a_card_keep_their_schemas_fields() {
        let mut new = std::collections::BTreeMap::new();
        for document in [races(), crate::found::tests::document()] {
            let schema = document["schema"].as_str().expect("a schema id").to_owned();
            let mut found = fields::Fields::new();
            fields::fields_of(&document, "", &mut found);
            new.insert(schema, found);
        }
        fields::settle(new);
    }

    fn races() -> serde_json::Value {
        let gain = search::Interval { low: -0.001, high: 0.001 };
        let notes = vec!["clocks: SM 1980 MHz".to_owned()];
        let decision = search::Decision::Reverted;
        let equal = search::Equal { decision, gain, rounds: 4, notes };
        let equals = search::Equals { noise_floor: 0.002, threshold: 0.01, all: vec![equal] };
        evaluate::aa_document(&search::Verdict::new("toy", "h200", "NVIDIA H200"), &equals)
    }
}
