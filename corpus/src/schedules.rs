//! Found schedules that are shipped, by the shape of their graph.

use std::sync::LazyLock;

use ir::Target;
use ir::program::GraphShape;

/// A schedule that is shipped for a shape on a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shipped {
    /// The GPU.
    pub target: &'static str,
    /// The folder's name, for people only: lookups do not use it.
    pub folder: &'static str,
    /// The shape of its graph.
    pub shape: GraphShape,
    /// The context length at which it was found, in tokens.
    pub context: u32,
    /// The schedule as JSON. It may be used for another shape or GPU than its own, so it must be validated like any
    /// other.
    pub schedule: &'static str,
    /// Its evidence, as JSON.
    pub bundle: Option<&'static str>,
}

/// A shipped schedule for a graph, and how well it fits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Match {
    /// The schedule.
    pub shipped: &'static Shipped,
    /// Whether its shape is that of the graph.
    pub same_shape: bool,
    /// [`shape_distance`] between the two shapes.
    pub distance: f64,
}

/// Largest [`shape_distance`] at which a shipped schedule is better than the rule-based default.
///
/// From a leave-one-out over the presets with the cost model (`docs/lab/2026-11-26-default-in-tiles.md`).
pub const SHAPE_DISTANCE_MAX: f64 = 1.3;

/// A file of `schedules/`: target, folder, shape, context, schedule and bundle.
type File = (&'static str, &'static str, &'static str, u32, &'static str, Option<&'static str>);

/// All files, by target, folder and name.
const FILES: &[File] = include!(concat!(env!("OUT_DIR"), "/shipped.rs"));

static SHIPPED: LazyLock<Vec<Shipped>> = LazyLock::new(|| {
    let read = |&(target, folder, shape, context, schedule, bundle): &File| {
        let shape: Result<GraphShape, _> = serde_json::from_str(shape);
        let shape = shape.unwrap_or_else(|e| panic!("schedules/{target}/{folder}/shape.json: {e}"));
        Shipped { target, folder, shape, context, schedule, bundle }
    };
    FILES.iter().map(read).collect()
});

/// Every shipped schedule.
///
/// # Panics
/// If a compiled-in shape is invalid.
#[must_use]
pub fn all_shipped() -> &'static [Shipped] {
    &SHIPPED
}

/// The distance between two shapes: the sum of `|ln ratio|` of hidden, ffn, layers, heads and key/value heads. `None`
/// if the element types of operands or of codes differ, or only one has experts.
#[must_use]
pub fn shape_distance(a: &GraphShape, b: &GraphShape) -> Option<f64> {
    let sizes =
        |GraphShape { dims: s, .. }: &GraphShape| [s.hidden, s.ffn, s.layers, s.heads, s.kv_heads];
    let pairs = sizes(a).into_iter().zip(sizes(b));
    ((a.dims.dtype, a.codes, a.experts) == (b.dims.dtype, b.codes, b.experts))
        .then(|| pairs.map(|(a, b)| ratio(a.into(), b.into())).sum())
}

/// The shipped schedules that are worth trying for a graph, best first: those of its own shape before those of similar
/// ones, those of the same GPU before those of others of its architecture, and the nearest context by ratio, the
/// smaller of two. The ratio is used because the important choice, the number of workers per head's keys, depends on
/// the logarithm of the context.
#[must_use]
pub fn shipped(shape: &GraphShape, target: &Target, context: u32) -> Vec<Match> {
    matching(all_shipped(), shape, target, context)
}

fn matching(
    all: &'static [Shipped],
    shape: &GraphShape,
    target: &Target,
    context: u32,
) -> Vec<Match> {
    let rank = |shipped: &'static Shipped| {
        let distance = shape_distance(&shipped.shape, shape)?;
        let same_shape = shipped.shape == *shape;
        let other = Target::by_name(shipped.target).ok().filter(|of| of.arch == target.arch)?;
        let gpu = if other.name == target.name { 0.0 } else { gpu_distance(&other, target) };
        let tokens = ratio(shipped.context.into(), context.into());
        let order = (!same_shape, distance, gpu, tokens, shipped.context);
        (distance <= SHAPE_DISTANCE_MAX).then_some((order, Match { shipped, same_shape, distance }))
    };
    let mut found: Vec<_> = all.iter().filter_map(rank).collect();
    found.sort_by(|(a, _), (b, _)| {
        let floats = a.1.total_cmp(&b.1).then(a.2.total_cmp(&b.2)).then(a.3.total_cmp(&b.3));
        a.0.cmp(&b.0).then(floats).then(a.4.cmp(&b.4))
    });
    found.into_iter().map(|(_, found)| found).collect()
}

/// The distance between two GPUs as far as schedules are concerned. Cards of one name are equal, whatever their sizes.
fn gpu_distance(a: &Target, b: &Target) -> f64 {
    let sizes = |t: &Target| [f64::from(t.sms), f64::from(t.smem_optin_bytes), t.bandwidth as f64];
    1e-9 + sizes(a).into_iter().zip(sizes(b)).map(|(a, b)| ratio(a, b)).sum::<f64>()
}

fn ratio(a: f64, b: f64) -> f64 {
    (a.max(1.0).ln() - b.max(1.0).ln()).abs()
}

#[cfg(test)]
mod tests {
    use ir::program::Dims;

    use super::*;

    const DIMS: Dims = Dims {
        hidden: 2048,
        heads: 32,
        kv_heads: 8,
        head_dim: 64,
        ffn: 8192,
        vocab: 128_256,
        layers: 16,
        dtype: ir::DType::Bf16,
    };

    const fn at(target: &'static str, dims: Dims, context: u32) -> Shipped {
        of(target, GraphShape { dims, codes: None, experts: false }, context)
    }

    const fn of(target: &'static str, shape: GraphShape, context: u32) -> Shipped {
        Shipped { target, folder: "f", shape, context, schedule: "{}", bundle: None }
    }

    const LONGER: Dims = Dims { layers: 20, ..DIMS };
    const TUNED: Dims = Dims { vocab: 128_264, ..DIMS };
    const HALF: Dims = Dims { dtype: ir::DType::F16, ..DIMS };
    const CODES: GraphShape =
        GraphShape { dims: HALF, codes: Some(ir::DType::Int4G128), experts: false };
    const FAR: Dims = Dims { hidden: 8192, ffn: 28_672, ..DIMS };

    static ALL: &[Shipped] = &[
        at("h200", LONGER, 128),
        at("h200", DIMS, 128),
        at("h200", DIMS, 16384),
        at("h200", DIMS, 2048),
        at("a100", DIMS, 512),
        at("h200", HALF, 512),
        at("h200", FAR, 512),
    ];

    fn found(all: &'static [Shipped], dims: Dims, gpu: &str, context: u32) -> Vec<(u32, u32)> {
        found_of(all, GraphShape { dims, codes: None, experts: false }, gpu, context)
    }

    fn found_of(
        all: &'static [Shipped],
        shape: GraphShape,
        gpu: &str,
        context: u32,
    ) -> Vec<(u32, u32)> {
        let target = Target::by_name(gpu).expect("a known target");
        let all = matching(all, &shape, &target, context);
        all.iter().map(|m| (m.shipped.shape.dims.layers, m.shipped.context)).collect()
    }

    #[test]
    fn shipped_schedules_are_json_objects_and_found_by_their_shape() {
        for each in all_shipped() {
            let target = Target::by_name(each.target).expect(each.target);
            let best = shipped(&each.shape, &target, each.context)[0];
            assert_eq!((best.shipped, best.same_shape, best.distance), (each, true, 0.0));
            let parsed: serde_json::Value = serde_json::from_str(each.schedule).expect(each.folder);
            assert!(parsed.is_object(), "{each:?}");
        }
        assert!(SHIPPED.len() >= 4, "the schedules under corpus/schedules/ are listed");
    }

    #[test]
    fn the_nearest_context_by_ratio_is_chosen() {
        let cases = [
            (0, 128),
            (128, 128),
            (511, 128),
            (512, 128),
            (513, 2048),
            (1900, 2048),
            (5792, 2048),
            (5793, 16384),
            (u32::MAX, 16384),
        ];
        for (context, expected) in cases {
            assert_eq!(found(ALL, DIMS, "h200", context)[0], (16, expected), "context {context}");
        }
    }

    #[test]
    fn the_own_shape_is_before_similar_ones_and_another_architecture_is_none() {
        let all = found(ALL, DIMS, "h200", 128);
        assert_eq!(all, [(16, 128), (16, 2048), (16, 16384), (20, 128)]);
        assert_eq!(found(ALL, DIMS, "h100", 128), all, "the same architecture");
        assert_eq!(found(ALL, DIMS, "a100", 128), [(16, 512)]);
        assert_eq!(found(ALL, DIMS, "l40s", 128), []);
        assert_eq!(found(ALL, LONGER, "h200", 128)[0], (20, 128));
        assert_eq!(found(ALL, Dims { dtype: ir::DType::F32, ..DIMS }, "h200", 128), []);
    }

    #[test]
    fn codes_take_schedules_of_their_own_element_type() {
        const SHALLOW: GraphShape = GraphShape { dims: Dims { layers: 14, ..HALF }, ..CODES };
        static WITH: &[Shipped] =
            &[at("h200", HALF, 512), of("h200", CODES, 128), of("h200", SHALLOW, 64)];
        assert_eq!(found_of(WITH, CODES, "h200", 512), [(16, 128), (14, 64)]);
        assert_eq!(found(WITH, HALF, "h200", 512), [(16, 512)]);
        let eight = GraphShape { codes: Some(ir::DType::E4m3), ..CODES };
        assert_eq!(found_of(WITH, eight, "h200", 512), []);
    }

    #[test]
    fn the_gpu_of_the_name_is_before_another_one() {
        static TWO: &[Shipped] = &[at("h200", DIMS, 128), at("h100", DIMS, 4096)];
        assert_eq!(found(TWO, DIMS, "h100", 128), [(16, 4096), (16, 128)]);
        assert_eq!(found(TWO, DIMS, "h200", 128), [(16, 128), (16, 4096)]);
    }

    #[test]
    fn another_vocabulary_is_a_similar_shape() {
        let target = Target::by_name("h200").expect("a known target");
        let best =
            matching(ALL, &GraphShape { dims: TUNED, codes: None, experts: false }, &target, 128)
                [0];
        assert_eq!((best.same_shape, best.distance, best.shipped.context), (false, 0.0, 128));
    }
}
