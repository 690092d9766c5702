//! The reports of racecheck, classified. racecheck follows block barriers, warp barriers and, lane by lane, mbarriers. It
//! follows neither flags in shared memory nor an arrival of one lane for its warp behind a warp barrier, so it reports every
//! access that is ordered by one of those. A pair of accesses that fits no kind here is a race until shown otherwise.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;

/// One side of a report.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
pub(crate) struct Access {
    /// Whether it writes.
    pub(crate) writes: bool,
    /// The function, or the kernel if the access is inlined into it.
    pub(crate) function: String,
    /// File and line, if the kernel was compiled with them.
    pub(crate) place: Option<String>,
}

/// Accesses that something orders which racecheck does not follow.
struct Kind {
    name: &'static str,
    ordered_by: &'static str,
    fits: fn(write: &Access, other: &Access) -> bool,
}

/// The functions that write and read what a bulk copy delivers: registers are filled by loads without a function's name
/// (the kernel's own).
const RING: [&str; 5] =
    ["stage_copy_at", "stage_load", "stage_store", "values_pick", "amk_megakernel"];

/// An access by one of the first three marks the word as a flag, whatever the function of the other access. `store_if` raises
/// one too (`near`), and stores words that are no flags elsewhere.
const FLAG: [&str; 5] = ["flag_load", "flag_store", "flag_acquire", "store_if", "amk_megakernel"];

/// The functions by which the prefetcher stages a task.
const STAGING: [&str; 2] = ["prefetcher_run", "plan_store"];

const KINDS: [Kind; 3] = [
    Kind {
        name: "flag",
        ordered_by: "a word that is written and read again and again (stage.cuh); what else it announces is ordered by a block_fence on both sides",
        fits: |write, other| {
            let both = [&*write.function, &*other.function];
            both.iter().any(|function| function.contains("flag_"))
                && both.iter().all(|function| FLAG.contains(function))
        },
    },
    Kind {
        name: "staged task",
        ordered_by: "written by the prefetcher before it raises `fetched`, and not again before `done` says that every warp has left it",
        fits: |write, other| STAGING.contains(&&*write.function) && !other.writes,
    },
    Kind {
        name: "ring stage",
        ordered_by: "a copy lands before `full` completes, which every lane waits for; it is issued once a lane of every warp has arrived on `empty` behind a \
                     warp barrier. That the warp has read the stage by then is for stage_read and vm-host/tests/together.rs: a report cannot tell",
        fits: |write, other| {
            let both = [&*write.function, &*other.function];
            both.contains(&"stage_copy_at") && both.iter().all(|function| RING.contains(function))
        },
    },
];

/// Reports that are no race, and why.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct Known {
    pub(crate) kind: &'static str,
    pub(crate) hazards: u64,
    pub(crate) ordered_by: &'static str,
}

/// Two accesses that nothing is known to order.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct Race {
    pub(crate) between: [Access; 2],
    pub(crate) hazards: u64,
    /// The line of the report, if it could not be read.
    pub(crate) unread: Option<String>,
}

/// The hazards of a report.
pub(crate) fn classified(report: &str) -> (Vec<Known>, Vec<Race>) {
    let mut known = BTreeMap::from_iter(KINDS.iter().map(|kind| (kind.name, 0)));
    let mut races: BTreeMap<[Access; 2], u64> = BTreeMap::new();
    let mut unread = Vec::new();
    let mut first = None;
    for line in report.lines().filter(|line| line.contains(" access at ")) {
        let Some(access) = access(line) else {
            unread.push(line.to_owned());
            continue;
        };
        // The first access of a block stands on the line that says so; those that race with it follow.
        if line.contains(": Race ") {
            first = Some(access);
            continue;
        }
        let Some(one) = first.clone() else {
            unread.push(line.to_owned());
            continue;
        };
        let hazards = hazards(line);
        let (write, other) = if one.writes { (&one, &access) } else { (&access, &one) };
        match KINDS.iter().find(|kind| (kind.fits)(write, other)) {
            Some(kind) => *known.entry(kind.name).or_default() += hazards,
            None => *races.entry([one, access]).or_default() += hazards,
        }
    }
    let row = |kind: &Kind| Known {
        kind: kind.name,
        hazards: known[kind.name],
        ordered_by: kind.ordered_by,
    };
    let nobody = || Access { writes: false, function: "?".to_owned(), place: None };
    let unread = unread.into_iter().map(|line| Race {
        between: [nobody(), nobody()],
        hazards: 1,
        unread: Some(line.trim_start_matches('=').trim().to_owned()),
    });
    let mut races: Vec<Race> = races
        .into_iter()
        .map(|(between, hazards)| Race { between, hazards, unread: None })
        .chain(unread)
        .collect();
    races.sort_by_key(|race| std::cmp::Reverse(race.hazards));
    (KINDS.iter().map(row).collect(), races)
}

/// The access of a line such as `Write access at flag_store(unsigned int *)+0x7a00 in stage.cuh:8`.
fn access(line: &str) -> Option<Access> {
    let (before, after) = line.split_once(" access at ")?;
    let kind = before.rsplit(' ').next()?;
    let end = after.find(|c: char| !c.is_alphanumeric() && c != '_')?;
    let (function, rest) = after.split_at(end);
    let place = rest.split_once(" in ").and_then(|(_, place)| place.split_whitespace().next());
    (matches!(kind, "Read" | "Write") && !function.is_empty()).then(|| Access {
        writes: kind == "Write",
        function: function.to_owned(),
        place: place.filter(|place| place.contains(':')).map(str::to_owned),
    })
}

/// The count of `[66896 hazards]`.
fn hazards(line: &str) -> u64 {
    let counted = line.rsplit_once('[').and_then(|(_, count)| count.split_once(" hazard"));
    counted.and_then(|(count, _)| count.parse().ok()).unwrap_or(1)
}
