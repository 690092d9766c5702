//! Checks a config against a graph and a target.
//!
//! **Checked:** every knob is in the table's domain; the graph and target are within the opcode table's limits; the
//! rules between knobs (`S-RING`, `S-IN-FLIGHT`, `S-BEFORE-WAIT`, `S-THREADS`,
//! `S-SPLIT`, `S-EMBED`, `S-REMOTE`). A rule between knobs is
//! skipped if one of its knobs is outside its domain. **Not checked:** limits of the lowered program (`lower`), and
//! that the kernel compiles (the build).
//!
//! **Rounding.** There is none. Bytes in flight must be whole stages, and the given value is the one that runs.

use abi::Activation;

use super::value::{Domain, EmbedGrouping, Handoff, KnobType as _, MergeGrouping, Value};
use super::{Knob, ScheduleConfig, Valid};
use crate::block::{FeedForward, Gated};
use crate::graph::{Graph, Linear};
use crate::program::{DEVICES_MAX, Dims, attended, smem};
use crate::target::Target;
use crate::violation::{At, Rule, Violation, Violations};

/// Widest vector for which sizes are computed without overflow.
const WIDTH_MAX: u32 = 1 << 20;

/// The factor in the sigmoid of `clamped_silu`.
const CLAMPED_ALPHA: f32 = 1.702;

const _: () = assert!(abi::STAGES_MAX >= 25, "the table's stages fit the ABI");

/// Checks every rule and lists everything that is wrong.
///
/// # Errors
/// All violations.
pub fn validate(
    config: ScheduleConfig,
    graph: &Graph,
    target: &Target,
) -> Result<Valid<ScheduleConfig>, Violations> {
    check(&config, graph, target).into_result().map(|()| Valid(config))
}

pub(super) fn check(config: &ScheduleConfig, graph: &Graph, target: &Target) -> Violations {
    let mut found = Violations::default();
    domains(config, &mut found);
    graph_limits(graph, &mut found);
    target_limits(target, &mut found);
    let fits = |rule| !found.has(rule);
    if fits(Rule::SRange) && fits(Rule::SGraph) {
        ring(config, graph, target, &mut found);
        splits(config, graph, &mut found);
        embedding(config, graph, &mut found);
        remote(config, graph, target, &mut found);
    }
    in_flight(config, &mut found);
    threads(target, &mut found);
    found
}

/// The bytes of a worker's activation buffer.
#[must_use]
pub fn activation_bytes(graph: &Graph) -> u32 {
    smem::activation_bytes(&Dims::from(graph), graph.vectors())
}

/// The most stages that the table allows and that fit in shared memory, with the rest of the config unchanged. `None`
/// if not even the fewest fit.
#[must_use]
pub fn largest_stages(config: &ScheduleConfig, graph: &Graph, target: &Target) -> Option<u32> {
    let (min, max) = match Knob::PipelineStages.domain() {
        Domain::Range { min, max, .. } => (min, max),
        Domain::Choices(_) => (1, abi::STAGES_MAX),
    };
    let stage = smem::stage_bytes(config.pipeline.stage_bytes, graph.unit_bytes());
    let other = smem::worker_bytes(0, stage, activation_bytes(graph));
    let room = target.smem_optin_bytes.checked_sub(other)? / stage.max(1);
    (room >= min).then_some(room.min(max))
}

fn at(knob: Knob) -> At {
    At::Knob(knob.path().to_string())
}

fn domains(config: &ScheduleConfig, found: &mut Violations) {
    for &knob in Knob::ALL {
        let value = config.get(knob);
        if !knob.domain().contains(value) {
            found.add(super::parse::out_of_range(knob, value.to_json()));
        }
    }
}

fn graph_limits(graph: &Graph, found: &mut Violations) {
    let mut refuse = |what: &str, value: u32, legal: String| {
        let detail = format!("{what} is {value} in {}", graph.name);
        found.add(Violation::new(Rule::SGraph, At::Graph, detail).value(value).legal(legal));
    };
    let widths = [
        ("hidden", graph.hidden),
        ("ffn", graph.ffn),
        ("vocab", graph.vocab),
        ("heads", graph.heads),
    ];
    for (what, width) in widths
        .into_iter()
        .chain([("kv_heads", graph.kv_heads), ("max_positions", graph.max_positions)])
    {
        if width == 0 {
            refuse(what, width, "at least 1".to_string());
        }
    }
    for (what, width) in
        [("hidden", graph.hidden), ("ffn", graph.ffn_width()), ("heads", graph.heads)]
    {
        if width > WIDTH_MAX {
            refuse(what, width, format!("at most {WIDTH_MAX}"));
        }
    }
    if graph.layers.is_empty() || graph.layers.len() >= usize::from(u16::MAX) {
        refuse("number of layers", graph.layers.len() as u32, format!("1 to {}", u16::MAX - 1));
    }
    if graph.activation == Activation::ClampedSilu {
        refuse("activation", graph.activation as u32, "that of experts only".into());
    }
    expert_limits(graph, &mut refuse);
    if graph.head_dim == 0
        || graph.head_dim > abi::HEAD_DIM_MAX
        || !graph.head_dim.is_multiple_of(2)
    {
        refuse("head_dim", graph.head_dim, format!("an even number up to {}", abi::HEAD_DIM_MAX));
    }
    if graph.kv_heads > 0 {
        if !graph.heads.is_multiple_of(graph.kv_heads) {
            refuse("heads", graph.heads, format!("a multiple of kv_heads = {}", graph.kv_heads));
        }
        if graph.heads / graph.kv_heads > abi::GROUP_MAX {
            refuse(
                "heads per kv_head",
                graph.heads / graph.kv_heads,
                format!("at most {}", abi::GROUP_MAX),
            );
        }
    }
}

/// The experts that no op computes: of widths or a number that the ops cannot take.
fn expert_limits(graph: &Graph, refuse: &mut impl FnMut(&str, u32, String)) {
    let experts = graph.layers.iter().filter_map(|layer| match &layer.mlp.body {
        FeedForward::Experts(experts) => Some(&**experts),
        FeedForward::Gated(_) => None,
    });
    for experts in experts {
        let count = experts.experts.len() as u32;
        if count == 0 || count > abi::EXPERTS_MAX {
            refuse("number of experts", count, format!("1 to {}", abi::EXPERTS_MAX));
        }
        let most = count.min(abi::SLOTS_MAX);
        if !(1..=most).contains(&experts.top_k) {
            refuse("number of chosen experts", experts.top_k, format!("1 to {most}"));
        }
        if !graph.hidden.is_multiple_of(abi::UNIT_ROWS) {
            let legal = format!("a multiple of {} with experts", abi::UNIT_ROWS);
            refuse("hidden", graph.hidden, legal);
        }
        if experts.clamped.is_some_and(|clamped| clamped.alpha != CLAMPED_ALPHA) {
            refuse("alpha of clamped experts", 0, format!("{CLAMPED_ALPHA}"));
        }
        // They are rows of one matrix, and a row of several is summed before it is scaled.
        let form = |linear: Linear| (graph.tensor(linear.weight).dtype, linear.scale);
        let of = |&Gated { gate, up, down }: &Gated| [gate, up, down].map(form);
        let mut forms = experts.experts.iter().map(of);
        let first = forms.next();
        if !forms.all(|form| Some(form) == first) {
            refuse("format of experts", 0, "one for all of a layer, with the same scales".into());
        }
    }
}

fn target_limits(target: &Target, found: &mut Violations) {
    if target.sms == 0 || target.sms > abi::WORKERS_MAX {
        let detail = format!("{} has {} multiprocessors, one worker each", target.name, target.sms);
        let legal = format!("1 to {}", abi::WORKERS_MAX);
        found.add(Violation::new(Rule::STarget, At::Target, detail).value(target.sms).legal(legal));
    }
    if !(1..=DEVICES_MAX).contains(&target.devices) {
        let detail = format!("{} is {} GPUs", target.name, target.devices);
        let violation = Violation::new(Rule::STarget, At::Target, detail).value(target.devices);
        found.add(violation.legal(format!("1 to {DEVICES_MAX}")));
    }
}

fn ring(config: &ScheduleConfig, graph: &Graph, target: &Target, found: &mut Violations) {
    let pipeline = config.pipeline;
    let activations = activation_bytes(graph);
    let stage = smem::stage_bytes(pipeline.stage_bytes, graph.unit_bytes());
    let needed = smem::worker_bytes(pipeline.stages, stage, activations);
    let available = target.smem_optin_bytes;
    if needed <= available {
        return;
    }
    let detail = format!(
        "{} stages of {stage} bytes need {needed} bytes of shared memory with {activations} for activations and {} fixed, {} has {available}",
        pipeline.stages,
        abi::FIXED_BYTES,
        target.name
    );
    let violation =
        Violation::new(Rule::SRing, at(Knob::PipelineStages), detail).value(pipeline.stages);
    found.add(match largest_stages(config, graph, target) {
        Some(most) => violation
            .legal(format!("at most {most} stages of {} bytes", pipeline.stage_bytes))
            .suggest(format!("pipeline.stages = {most}")),
        None => violation
            .legal(format!("no number of stages of {} bytes", pipeline.stage_bytes))
            .suggest("a smaller pipeline.stage_bytes, or a target with more shared memory"),
    });
}

fn in_flight(config: &ScheduleConfig, found: &mut Violations) {
    let pipeline = config.pipeline;
    let stage = pipeline.stage_bytes;
    if found.has(Rule::SRange) {
        return;
    }
    let ring = stage * pipeline.stages;
    let caps = [
        (Knob::PipelineInFlightBytes, pipeline.in_flight_bytes),
        (Knob::PipelineInFlightBeforeWaitBytes, pipeline.in_flight_before_wait_bytes),
    ];
    for (knob, bytes) in caps {
        if bytes >= stage && bytes <= ring && bytes.is_multiple_of(stage) {
            continue;
        }
        let detail =
            format!("{bytes} bytes in flight with {} stages of {stage} bytes", pipeline.stages);
        let nearest = (bytes / stage).clamp(1, pipeline.stages) * stage;
        found.add(
            Violation::new(Rule::SInFlight, at(knob), detail)
                .value(bytes)
                .legal(format!("multiples of {stage} from {stage} to {ring}"))
                .suggest(format!("{knob} = {nearest}")),
        );
    }
    if pipeline.in_flight_before_wait_bytes > pipeline.in_flight_bytes {
        let detail = format!(
            "{} before waits, {} elsewhere",
            pipeline.in_flight_before_wait_bytes, pipeline.in_flight_bytes
        );
        let knob = Knob::PipelineInFlightBeforeWaitBytes;
        found.add(
            Violation::new(Rule::SBeforeWait, at(knob), detail)
                .value(pipeline.in_flight_before_wait_bytes)
                .legal(format!("at most {}", pipeline.in_flight_bytes))
                .suggest(format!("{knob} = {}", pipeline.in_flight_bytes)),
        );
    }
}

fn threads(target: &Target, found: &mut Violations) {
    let (threads, most) =
        ((abi::CONSUMER_WARPS + abi::HELPER_WARPS) * 32, target.threads_per_block_max);
    if threads > most {
        let detail = format!("a worker has {threads} threads, {} allows {most}", target.name);
        let legal = format!("a target that allows {threads}");
        found.add(Violation::new(Rule::SThreads, At::Target, detail).value(most).legal(legal));
    }
    if !target.has_mma() {
        let detail = format!("{} is {}, which has no mma for 16 bits", target.name, target.arch);
        found.add(Violation::new(Rule::SThreads, At::Target, detail).legal("sm_80 or later"));
    }
}

fn embedding(config: &ScheduleConfig, graph: &Graph, found: &mut Violations) {
    let normed = graph.layers.first().is_some_and(|layer| layer.attention.norm.is_some());
    if config.fusion_grouping.embed == EmbedGrouping::Separate || normed && graph.embed_scale == 1.0
    {
        return;
    }
    let detail = match normed {
        true => format!("{} multiplies the embedding by {}", graph.name, graph.embed_scale),
        false => format!("{} has no norm before the first product", graph.name),
    };
    let knob = Knob::FusionGroupingEmbed;
    found.add(
        Violation::new(Rule::SEmbed, at(knob), detail)
            .legal("separate")
            .suggest(format!("{knob} = separate")),
    );
}

/// The hand-offs whose words all GPUs read, if there are several: everything but the embedding, what attention reads of
/// its own heads, and partials that the GPU which has the heads merges.
#[must_use]
pub fn remote_handoffs(config: &ScheduleConfig, graph: &Graph) -> Vec<Knob> {
    let attended = match config.fusion_grouping.merge {
        MergeGrouping::OProj => Knob::SyncAttention,
        MergeGrouping::Separate => Knob::SyncMerge,
    };
    let mut knobs = vec![attended, Knob::SyncOProj, Knob::SyncGateUp, Knob::SyncDown];
    if graph.layers.iter().any(|layer| graph.norms_all_heads(layer)) {
        knobs.insert(0, Knob::SyncQkv);
    }
    knobs
}

/// Another GPU's counter cannot be waited for, and each GPU needs a candidate.
fn remote(config: &ScheduleConfig, graph: &Graph, target: &Target, found: &mut Violations) {
    if target.devices == 1 {
        return;
    }
    for knob in remote_handoffs(config, graph) {
        if config.get(knob) == Handoff::FlagInData.to_value() {
            continue;
        }
        let detail = format!("{} GPUs read what it hands over", target.devices);
        found.add(
            Violation::new(Rule::SRemote, at(knob), detail)
                .value(config.get(knob).to_json())
                .legal("flag_in_data")
                .suggest(format!("{knob} = flag_in_data")),
        );
    }
    let tiles = graph.vocab.div_ceil(abi::UNIT_ROWS);
    if tiles < target.devices {
        let detail =
            format!("{} rows of logits are {tiles} tiles for {} GPUs", graph.vocab, target.devices);
        found.add(Violation::new(Rule::SRemote, At::Graph, detail).legal(format!("1 to {tiles}")));
    }
}

/// Most keys that any layer attends to, at the last position.
fn keys_max(graph: &Graph) -> u32 {
    let last = graph.max_positions.saturating_sub(1);
    graph
        .layers
        .iter()
        .map(|layer| attended(last, layer.attention.body.window.unwrap_or(0)))
        .max()
        .unwrap_or(1)
}

fn splits(config: &ScheduleConfig, graph: &Graph, found: &mut Violations) {
    let attention = config.tiling.attention;
    let keys = keys_max(graph);
    let useful = keys.div_ceil(attention.kv_block).min(abi::SPLITS_MAX);
    if attention.kv_split > useful {
        let fits = |v: &Value| matches!(v, Value::Number(n) if *n <= useful);
        let largest = Knob::TilingAttentionKvSplit
            .values()
            .into_iter()
            .rfind(fits)
            .unwrap_or(Value::Number(1));
        let detail = format!(
            "{} splits of blocks of {} keys, but {} attends to at most {keys} keys, {useful} blocks",
            attention.kv_split, attention.kv_block, graph.name
        );
        found.add(
            Violation::new(Rule::SSplit, at(Knob::TilingAttentionKvSplit), detail)
                .value(attention.kv_split)
                .legal(format!("at most {useful}"))
                .suggest(format!("tiling.attention.kv_split = {largest}")),
        );
    }
}
