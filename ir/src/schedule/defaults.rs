//! The schedules that need no search: the rule-based default, and the neutral one that studies start from.

use super::validate::{check, largest_stages, remote_handoffs};
use super::value::{EmbedGrouping, Evict, Handoff, KnobType as _, MergeGrouping, SmAssignment};
use super::{Knob, ScheduleConfig};
use crate::graph::Graph;
use crate::phase::PhaseClass;
use crate::program::{PackedModel, group_parts};
use crate::target::Target;
use crate::violation::Rule;

/// Bytes in flight before a wait: one stage of the default ring.
const NEAR_BYTES: u32 = 32 * 1024;

/// Bytes of a stage, best first.
const STAGE_BYTES: [u32; 3] = [32 * 1024, 16 * 1024, 8 * 1024];

/// Stages that a ring of the default should have: with fewer, smaller stages are predicted to be faster by 4 to 10%
/// (shapes of 32 and 70 billion parameters; not measured).
const STAGES_LEAST: u32 = 4;

/// Context of [`default_config`]: short enough for one worker to read all keys of a head.
const SHORT_CONTEXT: u32 = 128;

/// Keys per split: a further split pays only beyond this many.
const KEYS_PER_SPLIT: u32 = 256;

/// Keys per block of a split.
const KV_BLOCK: u32 = 128;

/// Most splits: more are never predicted faster up to 16 384 tokens.
const SPLITS_MAX: u32 = 16;

/// Most splits that the output projection merges itself: each of its workers reads all of them.
const FUSED_SPLITS_MAX: u32 = 4;

/// The rule-based default at a short context: the value of each knob that a config leaves out, and the schedule where
/// none is known.
#[must_use]
pub fn default_config(graph: &Graph, target: &Target) -> ScheduleConfig {
    default_config_at(graph, target, SHORT_CONTEXT)
}

/// The rule-based default for this many tokens of context: flag-in-data hand-offs everywhere, embedding and merge
/// fused, the deepest ring of 32 KB stages that fits, one stage in flight before a wait, no sleep between polls, less of
/// `qkv` and `o_proj` for the workers that run attention where a model is wide and dense, else the remainder of each phase
/// carried on, smaller blocks of a product where its largest share gets smaller by that, and one split of the keys per
/// [`KEYS_PER_SPLIT`] as far as there are workers.
///
/// Where four 32 KB stages do not fit, stages get smaller. If nothing fits, `validate` refuses the result.
#[must_use]
pub fn default_config_at(graph: &Graph, target: &Target, context: u32) -> ScheduleConfig {
    let rule = ruled(graph, target);
    let deep = STAGE_BYTES[..2].iter().find_map(|&bytes| {
        fitted(rule, &[bytes], u32::MAX, graph, target)
            .filter(|config| config.pipeline.stages >= STAGES_LEAST)
    });
    let any = || fitted(rule, &STAGE_BYTES, u32::MAX, graph, target);
    let mut config = deep.or_else(any).unwrap_or(rule);
    split_keys(&mut config, graph, target, context);
    config
}

/// The neutral schedule: the knob table's values, changed only where they would be illegal. It is the named start of
/// searches that measure their gain from a schedule without choices; it is not fast.
#[must_use]
pub fn neutral_config(graph: &Graph, target: &Target) -> ScheduleConfig {
    let mut neutral = ScheduleConfig::default();
    if target.devices > 1 {
        for knob in remote_handoffs(&neutral, graph) {
            // Every hand-off knob has this value.
            let _ = neutral.set(knob, Handoff::FlagInData.to_value());
        }
    }
    if check(&neutral, graph, target).is_empty() {
        return neutral;
    }
    let (sizes, stages) = ([neutral.pipeline.stage_bytes, 8 * 1024], neutral.pipeline.stages);
    fitted(neutral, &sizes, stages, graph, target).unwrap_or(neutral)
}

/// Rows of the smallest blocks: one tile.
const TILE_ROWS: u32 = abi::UNIT_ROWS;

/// Bytes that a smaller block must take from the largest share: half a stage. `down` of smollm2-135m, 24 KB, is 2.2% faster so
/// (docs/lab/2026-11-28-grids-of-today.md).
const SAVED_BYTES: u32 = 16 * 1024;

/// Deals a product in tiles where that takes [`SAVED_BYTES`] or more from the largest share, and with several GPUs gate and
/// up in any case, of which each worker has few blocks.
fn deal_tiles(config: &mut ScheduleConfig, graph: &Graph, target: &Target) {
    let packed = PackedModel::new(graph);
    let Some(layer) = packed.layers.first() else { return };
    let workers = (target.sms * target.devices).max(1);
    let tiling = &mut config.tiling;
    // Gate and up alternate by tiles: a worker has pairs of them.
    let products = [
        (&layer.attention.qkv, &mut tiling.qkv.rows, 1),
        (&layer.attention.o, &mut tiling.o_proj.rows, 1),
        (&layer.mlp.gate_up, &mut tiling.gate_up.rows, 2),
        (&layer.mlp.down, &mut tiling.down.rows, 1),
    ];
    for (matrix, rows, together) in products {
        let matrix = &packed.matrices[matrix.id.index()];
        let (tiles, block) = (matrix.tiles() / together, *rows / TILE_ROWS);
        let in_blocks = tiles.div_ceil(block).div_ceil(workers) * block;
        let saved = in_blocks.saturating_sub(tiles.div_ceil(workers)) * together;
        if matrix.experts == 1 && saved as usize * matrix.tile_bytes() >= SAVED_BYTES as usize {
            *rows = TILE_ROWS;
        }
    }
    if target.devices > 1 {
        tiling.gate_up.rows = TILE_ROWS;
    }
}

/// Whether workers that run attention get fewer tiles of the products before and after it: where `o_proj` has at least two
/// tiles per worker, so that the other workers can take some. On an H200 a step of qwen3-32b in int4 is 3.6% shorter, of
/// llama-3.1-8b 1.9% in int4 and 0.2% in 16 bits, of qwen3-4b and gemma-3-4b 0.7%; narrower models lose up to 5%, mixtures
/// were not timed with it (docs/lab/2026-11-29-passes-of-five-units.md, 2026-11-29-a-newer-compiler.md).
fn deals_around_attention(graph: &Graph, target: &Target) -> bool {
    let tiles = graph.hidden.div_ceil(TILE_ROWS);
    !graph.has_experts() && tiles >= 2 * target.sms * target.devices
}

/// The default's choices without the ring.
fn ruled(graph: &Graph, target: &Target) -> ScheduleConfig {
    let mut config = ScheduleConfig::default();
    for knob in PhaseClass::ALL.iter().filter_map(|class| class.sync()) {
        // Every hand-off knob has this value.
        let _ = config.set(knob, Handoff::FlagInData.to_value());
    }
    config.fusion_grouping.embed = EmbedGrouping::Qkv;
    if check(&config, graph, target).has(Rule::SEmbed) {
        config.fusion_grouping.embed = EmbedGrouping::Separate;
    }
    config.fusion_grouping.merge = MergeGrouping::OProj;
    config.tiling.lm_head.rows = TILE_ROWS;
    deal_tiles(&mut config, graph, target);
    config.kernel.poll_sleep_ns = 0;
    config.kernel.evict = Evict::First;
    config.sm_assignment = match deals_around_attention(graph, target) {
        true => SmAssignment::AroundAttention,
        false => SmAssignment::Carry,
    };
    config.pipeline.in_flight_before_wait_bytes = NEAR_BYTES;
    config
}

/// The config with the deepest ring, of at most this many stages, of the first of these sizes that fits.
fn fitted(
    config: ScheduleConfig,
    sizes: &[u32],
    stages_max: u32,
    graph: &Graph,
    target: &Target,
) -> Option<ScheduleConfig> {
    let sized = |&stage_bytes: &u32| {
        let mut sized = config;
        sized.pipeline.stage_bytes = stage_bytes;
        sized.pipeline.stages = largest_stages(&sized, graph, target)?.min(stages_max);
        let ring = sized.pipeline.stages * stage_bytes;
        sized.pipeline.in_flight_bytes = config.pipeline.in_flight_bytes.min(ring);
        sized.pipeline.in_flight_before_wait_bytes =
            config.pipeline.in_flight_before_wait_bytes.min(ring);
        check(&sized, graph, target).is_empty().then_some(sized)
    };
    sizes.iter().find_map(sized)
}

/// Splits the keys of each head over as many workers as this much context keeps busy: one per [`KEYS_PER_SPLIT`] keys,
/// as far as there are workers. Few splits are merged by the output projection, many in a phase of their own.
pub fn split_keys(config: &mut ScheduleConfig, graph: &Graph, target: &Target, context: u32) {
    let workers = target.sms / (graph.kv_heads * group_parts(graph.group())).max(1);
    let useful = context.min(graph.max_positions).div_ceil(KEYS_PER_SPLIT);
    let most = useful.min(workers).clamp(1, SPLITS_MAX);
    let mut split = *config;
    split.tiling.attention.kv_block = KV_BLOCK;
    for value in Knob::TilingAttentionKvSplit.values() {
        // Values are from the knob's own domain, in ascending order.
        let set = split.set(Knob::TilingAttentionKvSplit, value).is_ok();
        if !set || split.tiling.attention.kv_split > most {
            break;
        }
        split.fusion_grouping.merge = match split.tiling.attention.kv_split {
            0..=FUSED_SPLITS_MAX => MergeGrouping::OProj,
            _ => MergeGrouping::Separate,
        };
        if check(&split, graph, target).is_empty() {
            *config = split;
        }
    }
}
