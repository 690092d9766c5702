use abi::{BufferKind, Opcode};
use proptest::collection::vec;
use proptest::prelude::*;

use super::{LoadError, load, parse, print, save};
use crate::format::Format;
use crate::graph::DType;
use crate::id::{BufferId, CounterId, MatrixId, TensorId};
use crate::program::{
    Buffer, BufferSource, Dims, Matrix, Pipeline, Program, RowMap, Task, Topology, Wait, Worker,
};

fn name() -> impl Strategy<Value = String> {
    prop_oneof!["[a-z0-9._]{0,12}", any::<String>()]
}

fn row_map() -> impl Strategy<Value = RowMap> {
    (vec((any::<Option<u32>>().prop_map(|id| id.map(TensorId)), any::<u32>()), 0..4), any::<bool>())
        .prop_map(|(parts, interleaved)| RowMap { parts, interleaved })
}

fn matrix() -> impl Strategy<Value = Matrix> {
    let format = proptest::sample::select(Format::ALL);
    (name(), row_map(), any::<u32>(), format, any::<u32>())
        .prop_map(|(name, map, cols, format, experts)| Matrix { name, map, cols, format, experts })
}

fn buffer() -> impl Strategy<Value = Buffer> {
    let source = prop_oneof![
        Just(BufferSource::Scratch),
        row_map().prop_map(BufferSource::Vector),
        Just(BufferSource::Rotary(0)),
        (1..9_u32).prop_map(BufferSource::Rotary),
        any::<u32>().prop_map(|layer| BufferSource::KvCache { layer }),
        any::<u32>().prop_map(|id| BufferSource::Embedding(MatrixId(id))),
    ];
    let kind = proptest::sample::select(BufferKind::ALL);
    (name(), kind, any::<u32>(), source, any::<u64>()).prop_map(
        |(name, kind, words, source, offset)| Buffer { name, kind, words, source, offset },
    )
}

fn task() -> impl Strategy<Value = Task> {
    let word = prop_oneof![Just(0), 0..4_u32, any::<u32>(), any::<f32>().prop_map(f32::to_bits)];
    let wait = (any::<u32>(), any::<u32>())
        .prop_map(|(counter, count)| Wait { counter: CounterId(counter), count });
    let buffer = || any::<Option<u32>>().prop_map(|id| id.map(BufferId));
    let buffers = (proptest::array::uniform6(buffer()), proptest::array::uniform2(buffer()));
    let signal = any::<Option<u32>>().prop_map(|id| id.map(CounterId));
    (
        proptest::sample::select(Opcode::ALL),
        any::<u16>(),
        buffers,
        vec(wait, 0..4),
        signal,
        proptest::array::uniform16(word),
    )
        .prop_map(|(opcode, layer, (reads, writes), waits, signal, params)| Task {
            opcode,
            layer,
            reads,
            writes,
            waits,
            signal,
            params,
        })
}

fn worker() -> impl Strategy<Value = Worker> {
    vec(task(), 0..4).prop_map(|tasks| Worker { tasks })
}

fn dims() -> impl Strategy<Value = Dims> {
    (proptest::array::uniform7(any::<u32>()), proptest::sample::select(DType::ALL)).prop_map(
        |(n, dtype)| Dims {
            hidden: n[0],
            heads: n[1],
            kv_heads: n[2],
            head_dim: n[3],
            ffn: n[4],
            vocab: n[5],
            layers: n[6],
            dtype,
        },
    )
}

/// One device in three of four cases.
fn topology() -> impl Strategy<Value = Topology> {
    let several = (0..9_u32, vec(any::<u32>(), 0..4));
    prop_oneof![
        3 => Just(Topology::default()),
        1 => several.prop_map(|(devices, ids)| {
            Topology { devices, replicated: ids.into_iter().map(BufferId).collect() }
        }),
    ]
}

prop_compose! {
    fn program()(
        model in name(),
        dims in dims(),
        [kv_capacity, counters, stage_units, stages, in_flight, in_flight_before_wait] in proptest::array::uniform6(any::<u32>()),
        arena_bytes in any::<u64>(),
        matrices in vec(matrix(), 0..3),
        buffers in vec(buffer(), 0..4),
        workers in vec(worker(), 0..3),
        topology in topology(),
    ) -> Program {
        let pipeline = Pipeline { stage_units, stages, in_flight, in_flight_before_wait };
        Program { model, dims, kv_capacity, pipeline, matrices, buffers, counters, arena_bytes, workers, topology }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn text_loses_nothing(program in program()) {
        let text = print(&program);
        match parse(&text) {
            Ok(back) => prop_assert_eq!(back, program),
            Err(error) => prop_assert!(false, "{}\n{}", error, text),
        }
    }

    #[test]
    fn bytes_lose_nothing(program in program()) {
        prop_assert_eq!(load(&save(&program)), Ok(program));
    }

    #[test]
    fn damaged_bytes_are_refused(program in program(), place in any::<prop::sample::Index>(), flip in 1..=255_u8) {
        let mut bytes = save(&program);
        let place = place.index(bytes.len());
        bytes[place] ^= flip;
        prop_assert!(load(&bytes).is_err());
        prop_assert!(load(&bytes[..place]).is_err());
    }

    #[test]
    fn no_text_panics(text in "[ \\nmsw0-9a-z%:+=>#\\-\"\\\\;_{}]{0,200}") {
        let _ = parse(&text);
        let _ = parse(&format!("amk 2\nmodel \"\"\n{text}"));
    }

    #[test]
    fn hostile_programs_are_refused(program in program()) {
        prop_assert!(crate::program::check(&program).is_err());
    }

    #[test]
    fn no_payload_panics(payload in vec(any::<u8>(), 0..300)) {
        let mut bytes = save(&empty());
        bytes.truncate(16);
        bytes.extend(blake3::hash(&payload).as_bytes());
        bytes.extend((payload.len() as u64).to_le_bytes());
        bytes.extend(&payload);
        let _ = load(&bytes);
    }
}

fn empty() -> Program {
    let text = "amk 2\nmodel \"\"\ndims hidden=0 heads=0 kv_heads=0 head_dim=0 ffn=0 vocab=0 layers=0 dtype=f32\nkv_capacity 0\n\
                pipeline stage_units=0 stages=0 in_flight=0 in_flight_before_wait=0\ncounters 0\narena 0\n";
    parse(text).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn load_names_what_is_wrong() {
    let good = save(&empty());
    assert_eq!(load(b"GGUF and more"), Err(LoadError::Magic));
    assert_eq!(load(b""), Err(LoadError::Magic));
    let mut version = good.clone();
    version[4] = 9;
    assert_eq!(
        load(&version),
        Err(LoadError::Version { found: 9, expected: super::FORMAT_VERSION })
    );
    let mut foreign = good.clone();
    foreign[8] ^= 1;
    assert_eq!(
        load(&foreign),
        Err(LoadError::Abi { found: abi::program_hash() ^ 1, expected: abi::program_hash() })
    );
    let whole = good.len() as u64;
    assert_eq!(
        load(&good[..good.len() - 1]),
        Err(LoadError::Length { found: whole - 1, expected: whole })
    );
    let mut damaged = good;
    let last = damaged.len() - 1;
    damaged[last] ^= 1;
    assert_eq!(load(&damaged), Err(LoadError::Checksum));
}

#[test]
fn a_huge_count_allocates_nothing() {
    // A payload that announces 2^60 matrices: the decoder must run out of bytes, not of memory.
    let mut payload = empty().to_bytes().unwrap_or_default();
    payload.truncate(payload.len() - 5);
    payload.extend([0xff; 8]);
    payload.push(0x0f);
    let mut bytes = save(&empty());
    bytes.truncate(16);
    bytes.extend(blake3::hash(&payload).as_bytes());
    bytes.extend((payload.len() as u64).to_le_bytes());
    bytes.extend(&payload);
    assert!(matches!(load(&bytes), Err(LoadError::Malformed(_))));
}

#[test]
fn errors_have_places() {
    let text = print(&empty()) + "worker w0\n  matvec layer=0 k_lem=3\n";
    let error = parse(&text).map(|_| ()).map_err(|error| (error.line, error.column, error.message));
    assert_eq!(error, Err((9, 18, "`matvec` has no parameter `k_lem`".to_owned())));
}
