//! The tables of the store, declared once: the SQL, the filling and `docs/reference/store.md` are walks
//! over them.
//!
//! Two tables are **kept**: `records` has every acknowledged row of every ledger, word for word, with its hash chain,
//! and `programs` has the programs that led. All others are **derived** from `records` as rows are added, by the JSON
//! pointers below. So a change of a derived table needs no migration of its own: when the version increases they are
//! dropped and rebuilt.

use std::fmt::Write as _;

/// The type of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Text.
    Text,
    /// A whole number.
    Integer,
    /// A number.
    Real,
    /// 0 or 1.
    Flag,
    /// JSON, as text.
    Json,
    /// Bytes.
    Bytes,
}

impl Kind {
    fn sql(self) -> &'static str {
        match self {
            Self::Text | Self::Json => "TEXT",
            Self::Integer | Self::Flag => "INTEGER",
            Self::Real => "REAL",
            Self::Bytes => "BLOB",
        }
    }
}

/// The source of a column's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A JSON pointer into the record.
    At(&'static str),
    /// Code: the chain, a count, a part of a list.
    Code,
}

/// A column.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub kind: Kind,
    /// The source of its value.
    pub from: Source,
    /// Its meaning.
    pub about: &'static str,
}

/// The records that a table has rows of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// Kept, not derived.
    Kept,
    /// One row per header of a ledger.
    Header,
    /// One row per record of this `kind`.
    Record(&'static str),
    /// Several rows per record, made by code.
    Parts,
}

/// A table.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    /// Its name.
    pub name: &'static str,
    /// The meaning of a row.
    pub about: &'static str,
    /// The records that it has rows of.
    pub rows: Rows,
    /// The columns that identify a row.
    pub key: &'static str,
    /// All columns.
    pub columns: &'static [Column],
    /// Columns of further indexes.
    pub indexes: &'static [&'static str],
}

macro_rules! tables {
    ($($const:ident $name:literal rows $rows:expr, key $key:literal, indexes $indexes:expr, $about:literal {
        $($column:ident $kind:ident $from:expr, $what:literal;)*
    })*) => {
        $(const $const: Table = Table {
            name: $name,
            about: $about,
            rows: $rows,
            key: $key,
            columns: &[$(Column { name: stringify!($column), kind: Kind::$kind, from: $from, about: $what }),*],
            indexes: &$indexes,
        };)*

        /// Every table: the kept ones, then the derived ones.
        pub const TABLES: &[Table] = &[$($const),*];
    };
}

use Source::{At, Code};

tables! {
    RECORDS "records" rows Rows::Kept, key "run, seq", indexes [],
    "One acknowledged row of a ledger, word for word." {
        run Text Code, "the search's id";
        seq Integer Code, "the row's number in its ledger; 0 is the header";
        prev Text Code, "hash of the row before";
        hash Text Code, "hash of this row: blake3 of the ledger's line before its hash";
        record Text Code, "the row, as JSON";
    }
    PROGRAMS "programs" rows Rows::Kept, key "program_id", indexes [],
    "A program that led a search, in the binary form that `amk disasm` and `amk verify` read (postcard with a head)." {
        program_id Text Code, "hash of the program";
        saved Bytes Code, "the file's bytes (`.amkp`)";
    }
    RUNS "runs" rows Rows::Header, key "run", indexes [],
    "A search: the terms of its ledger's header." {
        run Text Code, "the search's id";
        model Text At("/model"), "the model, as `--model` took it";
        graph Text At("/graph"), "the graph's name";
        graph_id Text At("/graph_id"), "hash of the graph without its name; null in ledgers from before 2026-11-21";
        target Text At("/target"), "the target that schedules are for";
        latency_kind Text At("/latency_kind"), "`measured-gpu` or `predicted`; the two are never compared";
        device Text At("/device"), "the card's name, or `cpu`";
        machine Text Code, "the machine, of a search on several cards the first one's: a row of `machines`";
        seed Integer At("/seed"), "what proposals and tokens are drawn with";
        budget Text At("/budget"), "the first budget";
        min_gain Real At("/min_gain"), "the least gain worth keeping, a share";
        kv_capacity Integer At("/kv_capacity"), "positions of the key/value cache";
        contexts Json At("/contexts"), "tokens of context that schedules are judged at; null: about 128";
        batch Integer At("/batch"), "sequences of the steps that schedules are judged by; null: one";
        protocol Integer At("/protocol"), "version of how trials are gated, timed and decided";
        amk Text At("/amk"), "version of amk";
        source_commit Text At("/commit"), "the commit that amk was built from, if the build was told";
        began_unix_s Integer At("/began_unix_s"), "when the search began, seconds since 1970";
        hidden Integer At("/shape/hidden"), "width of the residual stream";
        layers Integer At("/shape/layers"), "layers";
        heads Integer At("/shape/heads"), "query heads";
        kv_heads Integer At("/shape/kv_heads"), "key/value heads";
        head_dim Integer At("/shape/head_dim"), "elements of a head";
        ffn Integer At("/shape/ffn"), "width of the MLP";
        vocab Integer At("/shape/vocab"), "rows of the logits";
        dtype Text At("/shape/dtype"), "element type of the tensor cores' operands";
        codes Text At("/shape/codes"), "element type of the matrices that are codes; null: none are";
    }
    MACHINES "machines" rows Rows::Header, key "machine", indexes [],
    "Where searches ran. What was only predicted ran on the machine `cpu`, of which nothing else is known." {
        machine Text Code, "hash of card, UUID, driver, CUDA version and compiler, or `cpu`";
        card Text At("/conditions/card"), "the card";
        uuid Text At("/conditions/uuid"), "the card's UUID";
        driver Text At("/conditions/driver"), "version of the kernel driver";
        cuda Text At("/conditions/cuda"), "version of CUDA that the driver speaks";
        nvrtc Text At("/conditions/nvrtc"), "version of the device compiler";
        clocks Text Code, "highest clocks, where NVML says them";
        cache_bytes Integer At("/cache_bytes"), "bytes of the last-level cache";
    }
    TRIALS "trials" rows Rows::Record("trial"), key "run, seq", indexes ["run, outcome, seq, latency_us", "program_id"],
    "A finished trial." {
        run Text Code, "the search's id";
        seq Integer Code, "the row's number in its ledger";
        trial Integer At("/trial"), "the trial's number";
        origin Text At("/origin"), "where the proposal came from";
        incumbent Integer At("/incumbent"), "the trial that it was compared with";
        outcome Text At("/outcome"), "how it ended";
        why Text At("/why"), "why, in one line";
        valid Flag At("/verdict/valid"), "validated, lowered and verified";
        correct Flag At("/verdict/correct"), "agreed with the graph";
        latency_us Real At("/verdict/latency_us"), "microseconds per token";
        latency_kind Text At("/verdict/latency_kind"), "`measured-gpu` or `predicted`";
        measured_on Text Code, "the machine of the card that did it: a row of `machines`; latencies of two machines are not comparable";
        ci_low_us Real At("/verdict/ci_us/0"), "lower end of the 99 % interval of a measured median";
        ci_high_us Real At("/verdict/ci_us/1"), "upper end";
        gain_low Real At("/gain/low"), "share of the time saved over the incumbent: lower end";
        gain_high Real At("/gain/high"), "upper end";
        threshold Real At("/threshold"), "what the gain had to beat";
        noise_floor Real At("/noise_floor"), "the noise, on the trial that measured it";
        predicted_us Real At("/predicted_us"), "what the cost model predicts where it was timed, if it was";
        bound_us Real At("/verdict/bound_us"), "the bound: bytes over bandwidth";
        pct_of_roofline Real At("/verdict/pct_of_roofline"), "100 * bound_us / latency_us";
        max_rel_err Real At("/verdict/max_rel_err"), "largest error of a logit over the largest logit of its position";
        schedule_id Text At("/verdict/schedule_id"), "hash of the schedule";
        program_id Text At("/verdict/program_id"), "hash of the lowered program";
        kernel_id Text At("/verdict/kernel_id"), "hash of the kernel build";
        tasks Integer At("/verdict/tasks"), "tasks of the program";
        rejected Integer At("/skipped/rejected"), "illegal proposals before this one";
        repeated Integer At("/skipped/repeated"), "proposals before this one that lowered to what was tried";
        total_s Real At("/spent/total_s"), "seconds that the trial took";
        ended_s Real At("/ended_s"), "seconds of search when it ended";
        changed Json At("/changed"), "knobs in which it differs from the incumbent: path to `[before, after]`";
        config Json At("/config"), "the schedule";
    }
    CONFIRMATIONS "confirmations" rows Rows::Record("confirmation"), key "run, seq", indexes [],
    "A champion, measured once more against the baseline." {
        run Text Code, "the search's id";
        seq Integer Code, "the row's number in its ledger";
        trials Integer At("/trials"), "trials that were finished";
        champion Integer At("/champion"), "the champion's trial";
        measured_on Text Code, "the machine of the card that `latency_us` is of: a row of `machines`";
        decision Text At("/decision"), "`kept`, `reverted` or `inconclusive`";
        why Text At("/why"), "why, in one line";
        positions Integer At("/positions"), "positions that the reference VM ran";
        latency_us Real At("/verdict/latency_us"), "microseconds per token";
        gain_low Real At("/gain/low"), "share of the time saved over the baseline: lower end";
        gain_high Real At("/gain/high"), "upper end";
    }
    SAMPLES "samples" rows Rows::Parts, key "run, seq, round", indexes [],
    "One round of a race: microseconds per token of its four blocks, in the order in which they ran." {
        run Text Code, "the search's id";
        seq Integer Code, "the row that was measured: a trial or a confirmation";
        round Integer Code, "from zero";
        incumbent_1_us Real Code, "incumbent (of a confirmation: the baseline)";
        candidate_1_us Real Code, "candidate";
        candidate_2_us Real Code, "candidate";
        incumbent_2_us Real Code, "incumbent";
    }
    CHANGES "changes" rows Rows::Parts, key "run, seq, knob", indexes ["knob"],
    "A knob in which a trial differed from its incumbent." {
        run Text Code, "the search's id";
        seq Integer Code, "the trial's row";
        knob Text Code, "dotted path";
        was Text Code, "its value in the incumbent";
        became Text Code, "its value in the trial";
    }
    PRIORS "priors" rows Rows::Parts, key "latency_kind, device, target, graph, move", indexes [],
    "What a move (the knobs that a trial changed, with their new values) brought so far, by graph, card and kind of latency." {
        latency_kind Text Code, "`measured-gpu` or `predicted`; the two are never mixed";
        device Text Code, "the card's name, or `cpu`";
        target Text Code, "the target";
        graph Text Code, "hash of the graph, or its name in ledgers without one; then ` at` and the contexts, and ` by` and the sequences of a step, if it had some";
        move Text Code, "JSON object: path to the new value, paths in the order of the knob table";
        tries Integer Code, "trials that made it";
        kept Integer Code, "of them, those that led afterwards; a champion that its confirmation refuted did not";
        failed Integer Code, "of them, those without a latency";
        gain_sum Real Code, "sum of the middles of their gains, shares of the time; a refuted champion's is zero";
        gain_best Real Code, "the greatest of them, before any confirmation";
    }
}

/// The kept tables that each version of the schema added; a version that only changed derived tables added none. A
/// file's `user_version` is the number of steps taken.
pub const STEPS: &[&[Table]] = &[&[RECORDS], &[PROGRAMS], &[], &[], &[], &[], &[]];

/// The version that this build writes.
pub const VERSION: i64 = STEPS.len() as i64;

impl Table {
    /// Whether it can be rebuilt from the records.
    #[must_use]
    pub fn is_derived(&self) -> bool {
        self.rows != Rows::Kept
    }

    /// The statements that create it, with what it holds as comments: SQLite keeps them, and `.schema` prints them.
    #[must_use]
    pub fn sql(&self) -> String {
        let mut out = format!("CREATE TABLE {} ( -- {}\n", self.name, self.about);
        for Column { name, kind, from, about } in self.columns {
            let from = match from {
                Source::At(pointer) => format!(" (record: {pointer})"),
                Source::Code => String::new(),
            };
            let _ = writeln!(out, "  {name} {}, -- {about}{from}", kind.sql());
        }
        let _ = writeln!(out, "  PRIMARY KEY ({})\n);", self.key);
        for (index, columns) in self.indexes.iter().enumerate() {
            let _ = writeln!(out, "CREATE INDEX {0}_{index} ON {0} ({columns});", self.name);
        }
        out
    }
}
