//! Schedules, programs in both forms, and the words of the ring.

use std::sync::LazyLock;

use ir::Target;
use ir::program::Program;
use model::Model;

const KV_CAPACITY: u32 = 16;

static TOY: LazyLock<(Model, Target)> = LazyLock::new(|| {
    (model::preset("toy").expect("a preset"), Target::by_name("h200").expect("a target"))
});

/// A config: parses it, and lowers it if it is legal.
pub(super) fn schedule(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let (model, target) = &*TOY;
    match ir::schedule::read_config(text, &model.graph, target) {
        Ok(valid) => {
            let options = lower::Options { kv_capacity: KV_CAPACITY };
            // A legal schedule lowers, unless it exceeds a limit; `lower` verifies the result.
            let _ = lower::lower(&valid, &model.graph, target, options);
        }
        Err(violations) => assert!(!violations.list().is_empty(), "refused without a reason"),
    }
}

pub(super) fn schedule_seeds() -> Vec<Vec<u8>> {
    let (model, target) = &*TOY;
    let whole = ir::schedule::default_config(&model.graph, target);
    let whole = serde_json::to_string(&whole).expect("a config is JSON").into_bytes();
    let some = br#"{"pipeline":{"stages":4},"fusion_grouping":{"merge":"o_proj"},"kernel":{"evict":"first"}}"#;
    vec![whole, some.to_vec()]
}

/// A program as text: parsing its printed form gives the same program, which is then verified.
pub(super) fn amk_text(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let Ok(program) = ir::text::parse(text) else { return };
    let printed = ir::text::print(&program);
    assert_eq!(ir::text::parse(&printed).as_ref(), Ok(&program), "printing lost something");
    verify(program);
}

fn verify(program: Program) {
    if let Err(violations) = ir::program::verify(program) {
        assert!(!violations.list().is_empty(), "refused without a reason");
    }
}

pub(super) fn amk_text_seeds() -> Vec<Vec<u8>> {
    let files = [
        "verify/accept/layer.amk",
        "verify/accept/flag-in-data.amk",
        "verify/accept/counters.amk",
        "text/odd-values.amk",
    ];
    files.map(|name| super::file(&format!("tests/filetests/{name}"))).to_vec()
}

/// `R` and a whole file, or `P` and a payload, which gets its header.
pub(super) fn amkp(input: &[u8]) {
    let Some((&form, rest)) = input.split_first() else { return };
    let loaded = if form == b'P' { ir::text::load(&framed(rest)) } else { ir::text::load(rest) };
    let Ok(program) = loaded else { return };
    let again = ir::text::load(&ir::text::save(&program));
    assert_eq!(again.as_ref(), Ok(&program), "saving lost something");
    verify(program);
}

/// Bytes of the header before its checksum: magic, version, ABI.
const BEFORE_CHECKSUM: usize = 4 + 4 + 8;
/// Bytes of the whole header.
const HEAD: usize = BEFORE_CHECKSUM + 32 + 8;

fn framed(payload: &[u8]) -> Vec<u8> {
    static SAVED: LazyLock<Vec<u8>> =
        LazyLock::new(|| ir::text::save(&parsed(&amk_text_seeds()[0])));
    let mut bytes = SAVED[..BEFORE_CHECKSUM].to_vec();
    bytes.extend_from_slice(blake3::hash(payload).as_bytes());
    bytes.extend_from_slice(&(payload.len() as u64).to_le_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

fn parsed(text: &[u8]) -> Program {
    let text = std::str::from_utf8(text).expect("file tests are text");
    ir::text::parse(text).expect("accepted file tests parse")
}

pub(super) fn amkp_seeds() -> Vec<Vec<u8>> {
    let saved =
        amk_text_seeds().iter().map(|text| ir::text::save(&parsed(text))).collect::<Vec<_>>();
    let payload = |file: &Vec<u8>| [b"P", &file[HEAD..]].concat();
    let mut seeds: Vec<_> = saved.iter().map(payload).collect();
    seeds.push([b"R", &saved[0][..]].concat());
    seeds
}

/// The words that host and device exchange, as either side reads them: no number is trusted to be in its table.
pub(super) fn ring(input: &[u8]) {
    let mut words =
        input.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
    let mut next = || words.next().unwrap_or(u32::MAX);
    let mut bytes =
        |length: usize| (0..length / 4).flat_map(|_| next().to_le_bytes()).collect::<Vec<u8>>();
    let status: abi::Status = bytemuck::pod_read_unaligned(&bytes(size_of::<abi::Status>()));
    let trap = abi::Trap::new(status.trap);
    assert_eq!(trap.map(|trap| trap as u32), trap.map(|_| status.trap));
    let _ = u16::try_from(status.opcode)
        .ok()
        .and_then(abi::Opcode::new)
        .map(|opcode| opcode.info().name);
    let completion: abi::Completion =
        bytemuck::pod_read_unaligned(&bytes(size_of::<abi::Completion>()));
    let _ = abi::Trap::new(completion.trap).map_or("unknown", abi::Trap::name);
    let submission: abi::Submission =
        bytemuck::pod_read_unaligned(&bytes(size_of::<abi::Submission>()));
    let _ = abi::Command::new(submission.command).map_or("unknown", abi::Command::name);
    let state = |word: u32| abi::EntryState::new(word % 10);
    for pair in bytes(64).as_chunks::<8>().0 {
        if let (Some(from), Some(to)) = (state(u32::from(pair[0])), state(u32::from(pair[4]))) {
            match abi::transition(from, to) {
                Ok(change) => assert_eq!((change.from, change.to), (from, to)),
                Err(refused) => assert_eq!((refused.from, refused.to), (from, to)),
            }
        }
    }
}

pub(super) fn ring_seeds() -> Vec<Vec<u8>> {
    vec![vec![0; 320], (0..=255).collect(), vec![0xff; 320]]
}
