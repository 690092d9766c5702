//! Derives the rows of the derived tables from records.

use rusqlite::types::Value as Cell;
use rusqlite::{Connection, OptionalExtension, params, params_from_iter};
use serde_json::{Map, Value, json};

use super::schema::{Column, Kind, Rows, Source, TABLES, Table};
use crate::conditions::Conditions;

/// The parts of a run's header that its rows need.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    latency_kind: String,
    device: String,
    target: String,
    graph: String,
    /// Machines, in the order of the header's cards; a single one for a search on one card.
    machines: Vec<String>,
}

impl Place {
    pub(super) fn of(header: &Value) -> Self {
        let text = |key: &str| header.get(key).and_then(Value::as_str).map(str::to_owned);
        let graph = text("graph_id").or_else(|| text("graph"));
        // What a move brings at one context, or for one sequence, says little of another.
        let part =
            |key, word| header.get(key).map_or_else(String::new, |of| format!(" {word} {of}"));
        let of = part("contexts", "at") + &part("batch", "by");
        Self {
            latency_kind: text("latency_kind").unwrap_or_default(),
            device: text("device").unwrap_or_default(),
            target: text("target").unwrap_or_default(),
            graph: graph.unwrap_or_default() + &of,
            machines: cards(header).iter().map(machine).collect(),
        }
    }

    /// The machine that a record was measured on.
    fn machine_of(&self, record: &Value) -> Option<&String> {
        let card = record.get("card").and_then(Value::as_u64).unwrap_or(0);
        self.machines.get(usize::try_from(card).ok()?)
    }
}

/// The conditions of each card of a search, from its header. There is one for a search on one card or without a card.
fn cards(header: &Value) -> Vec<Value> {
    match header.get("cards").and_then(Value::as_array) {
        Some(cards) if !cards.is_empty() => cards.iter().map(today).collect(),
        _ => vec![header.get("conditions").map_or(Value::Null, today)],
    }
}

/// Conditions in the current format. Other values are unchanged.
fn today(conditions: &Value) -> Value {
    let read = serde_json::from_value::<Conditions>(conditions.clone());
    read.map_or_else(|_| conditions.clone(), |conditions| json!(conditions))
}

/// A record to derive rows from.
pub(super) struct Record<'a> {
    pub(super) db: &'a Connection,
    pub(super) run: &'a str,
    pub(super) place: &'a Place,
    pub(super) seq: u64,
    pub(super) record: &'a Value,
}

impl Record<'_> {
    /// Fills the derived tables.
    pub(super) fn derive(&self) -> rusqlite::Result<()> {
        let kind = self.record.get("kind").and_then(Value::as_str).unwrap_or("");
        for table in TABLES {
            let wanted = match table.rows {
                Rows::Header => self.seq == 0,
                Rows::Record(wanted) => self.seq > 0 && kind == wanted,
                Rows::Kept | Rows::Parts => false,
            };
            if wanted && table.name == "machines" {
                self.machines(table)?;
            } else if wanted {
                self.insert(table)?;
            }
        }
        if self.seq == 0 {
            return Ok(());
        }
        self.samples()?;
        match kind {
            "trial" => self.changes().and_then(|()| self.prior()),
            "confirmation" => self.confirmed(),
            _ => Ok(()),
        }
    }

    /// Adds a machine for each card of a search.
    fn machines(&self, table: &Table) -> rusqlite::Result<()> {
        for (conditions, machine) in cards(self.record).into_iter().zip(&self.place.machines) {
            let place = &Place { machines: vec![machine.clone()], ..self.place.clone() };
            let record =
                &json!({"conditions": conditions, "cache_bytes": self.record.get("cache_bytes")});
            Record { place, record, ..*self }.insert(table)?;
        }
        Ok(())
    }

    /// Inserts the row of a table with one row per record.
    fn insert(&self, table: &Table) -> rusqlite::Result<()> {
        let cell = |column: &Column| match (column.from, column.name) {
            (Source::At(pointer), _) => cell_of(self.record.pointer(pointer), column.kind),
            (Source::Code, "run") => Cell::Text(self.run.to_owned()),
            (Source::Code, "seq") => Cell::Integer(self.seq.cast_signed()),
            (Source::Code, "clocks") => Cell::from(clocks(self.record)),
            (Source::Code, _) => Cell::from(self.place.machine_of(self.record).cloned()),
        };
        let marks = vec!["?"; table.columns.len()].join(",");
        // A machine exists already if an earlier search ran on it.
        let verb = if table.name == "machines" { "INSERT OR IGNORE" } else { "INSERT" };
        let mut statement =
            self.db.prepare_cached(&format!("{verb} INTO {} VALUES ({marks})", table.name))?;
        statement.execute(params_from_iter(table.columns.iter().map(cell)))?;
        Ok(())
    }

    fn samples(&self) -> rusqlite::Result<()> {
        let rounds = self.record.get("samples_us").and_then(Value::as_array);
        let mut statement = self.db.prepare_cached("INSERT INTO samples VALUES (?,?,?,?,?,?,?)")?;
        for (round, blocks) in rounds.into_iter().flatten().enumerate() {
            let us = |block: usize| blocks.get(block).and_then(Value::as_f64);
            let (seq, round) = (self.seq.cast_signed(), round as i64);
            statement.execute(params![self.run, seq, round, us(0), us(1), us(2), us(3)])?;
        }
        Ok(())
    }

    fn changes(&self) -> rusqlite::Result<()> {
        let mut statement = self.db.prepare_cached("INSERT INTO changes VALUES (?,?,?,?,?)")?;
        for (knob, pair) in changed(self.record).into_iter().flatten() {
            let (was, became) = (plain(pair.get(0)), plain(pair.get(1)));
            statement.execute(params![self.run, self.seq.cast_signed(), knob, was, became])?;
        }
        Ok(())
    }

    /// Subtracts a refuted champion's contribution from the priors, or adds it again when it is confirmed after all.
    fn confirmed(&self) -> rusqlite::Result<()> {
        let Some(champion) = self.record.get("champion").and_then(Value::as_i64) else {
            return Ok(());
        };
        let seq = self.seq.cast_signed();
        let before = "SELECT decision FROM confirmations WHERE run = ? AND champion = ? AND seq < ? \
            ORDER BY seq DESC LIMIT 1";
        let before: Option<Option<String>> = self
            .db
            .query_row(before, params![self.run, champion, seq], |row| row.get(0))
            .optional()?;
        let was_refuted = before.flatten().as_deref() == Some("reverted");
        let is_refuted = self.record.get("decision").and_then(Value::as_str) == Some("reverted");
        let sign = i64::from(was_refuted) - i64::from(is_refuted);
        let trial = "SELECT changed, coalesce((gain_low + gain_high) / 2, 0) FROM trials \
            WHERE run = ? AND trial = ? AND outcome = 'kept'";
        let trial: Option<(Option<String>, f64)> = self
            .db
            .query_row(trial, params![self.run, champion], |row| Ok((row.get(0)?, row.get(1)?)))
            .optional()?;
        let Some((Some(text), gain)) = trial.filter(|_| sign != 0) else { return Ok(()) };
        let parsed: Option<Map<String, Value>> = serde_json::from_str(&text).ok();
        let Some(changed) = parsed.filter(|changed| !changed.is_empty()) else { return Ok(()) };
        let Place { latency_kind, device, target, graph, machines: _ } = self.place;
        let update = "UPDATE priors SET kept = kept + ?, gain_sum = gain_sum + ? WHERE latency_kind = ? \
            AND device = ? AND target = ? AND graph = ? AND move = ?";
        let gain = sign as f64 * gain;
        let moved = moved(&changed);
        self.db.execute(update, params![sign, gain, latency_kind, device, target, graph, moved])?;
        Ok(())
    }

    fn prior(&self) -> rusqlite::Result<()> {
        let Some(changed) = changed(self.record) else { return Ok(()) };
        let end = |key: &str| self.record.pointer("/gain")?.get(key)?.as_f64();
        let gain = end("low").zip(end("high")).map(|(low, high)| f64::midpoint(low, high));
        let kept = self.record.get("outcome").and_then(Value::as_str) == Some("kept");
        let failed = self.record.pointer("/verdict/latency_us").is_none_or(Value::is_null);
        let Place { latency_kind, device, target, graph, machines: _ } = self.place;
        let mut statement = self.db.prepare_cached(
            "INSERT INTO priors VALUES (?,?,?,?,?,1,?,?,?,?) ON CONFLICT DO UPDATE SET tries = tries + 1, \
             kept = kept + excluded.kept, failed = failed + excluded.failed, gain_sum = gain_sum + excluded.gain_sum, \
             gain_best = max(coalesce(gain_best, excluded.gain_best), coalesce(excluded.gain_best, gain_best))",
        )?;
        let moved = moved(changed);
        let sum = gain.unwrap_or(0.0);
        statement.execute(params![
            latency_kind,
            device,
            target,
            graph,
            moved,
            kept,
            failed,
            sum,
            gain
        ])?;
        Ok(())
    }
}

fn cell_of(value: Option<&Value>, kind: Kind) -> Cell {
    let Some(value) = value.filter(|value| !value.is_null()) else { return Cell::Null };
    let found = match kind {
        Kind::Text => value.as_str().map(|text| Cell::Text(text.to_owned())),
        Kind::Integer => value.as_i64().map(Cell::Integer),
        Kind::Real => value.as_f64().map(Cell::Real),
        Kind::Flag => value.as_bool().map(|flag| Cell::Integer(flag.into())),
        Kind::Json => Some(Cell::Text(value.to_string())),
        Kind::Bytes => None,
    };
    // A value whose type differs from the table's is kept as text rather than lost.
    found.unwrap_or_else(|| Cell::Text(value.to_string()))
}

/// The highest clocks of the card in a record's conditions.
fn clocks(record: &Value) -> Option<String> {
    let conditions: Conditions = serde_json::from_value(record.get("conditions")?.clone()).ok()?;
    conditions.max_clocks()
}

/// The id of a machine, from the conditions of a card.
fn machine(conditions: &Value) -> String {
    if !conditions.is_object() {
        return "cpu".to_owned();
    }
    let part = |key: &str| conditions.get(key).and_then(Value::as_str).unwrap_or("");
    let text = [part("card"), part("uuid"), part("driver"), part("cuda"), part("nvrtc")].join("\n");
    blake3::hash(text.as_bytes()).to_hex()[..16].to_owned()
}

/// A trial's changes: path to `[before, after]`.
fn changed(record: &Value) -> Option<&Map<String, Value>> {
    record.get("changed")?.as_object().filter(|changed| !changed.is_empty())
}

/// A value for display: text without quotes.
fn plain(value: Option<&Value>) -> Option<String> {
    value.map(|value| value.as_str().map_or_else(|| value.to_string(), str::to_owned))
}

/// The move of a trial: paths of the knobs that it changed, with their new values.
fn moved(changed: &Map<String, Value>) -> String {
    let after = |(path, pair): (&String, &Value)| Some((path.clone(), pair.get(1)?.clone()));
    Value::Object(changed.iter().filter_map(after).collect()).to_string()
}
