//! Tests of the schedules found on this machine.

use super::*;
use crate::cli::{DeviceChoice, PlaceArgs};

fn toy(target: &str) -> Context {
    let target = Some(target.to_owned());
    let place = PlaceArgs { target, device: DeviceChoice::Cpu, ..PlaceArgs::default() };
    Context::load("toy", &place).unwrap_or_else(|failure| panic!("{}", failure.message))
}

fn entry(context: &Context, tokens: u32, latency_us: f64) -> Entry {
    let mut config = context.neutral_config();
    config.pipeline.stages = 5;
    Entry::new(context, "NVIDIA H200", tokens, &config, latency_us)
}

/// An entry, which needs a card.
pub(crate) fn document() -> serde_json::Value {
    serde_json::json!(entry(&toy("h200"), 16, 9.0))
}

fn kept(folder: &Path, entry: &Entry) -> PathBuf {
    keep(folder, entry).unwrap_or_else(|failure| panic!("{}", failure.message))
}

fn found(folder: &Path, context: &Context, tokens: u32) -> Option<Entry> {
    let (best, notes) = nearest_in(folder, context, tokens, 1);
    assert_eq!(notes, Vec::<String>::new());
    best.map(|(config, entry)| {
        assert_eq!(config.id(), entry.schedule_id);
        entry
    })
}

#[test]
fn what_is_kept_is_found_for_its_shape_gpu_and_context() {
    let home = tempfile::tempdir().unwrap();
    let (folder, h200) = (home.path().join("schedules"), toy("h200"));
    assert_eq!(found(&folder, &h200, 64), None, "there is no folder yet");
    let (short, long) = (entry(&h200, 16, 9.0), entry(&h200, 64, 10.0));
    kept(&folder, &short);
    kept(&folder, &long);
    assert_eq!(found(&folder, &h200, 17), Some(short.clone()));
    assert_eq!(found(&folder, &h200, 100), Some(long));
    assert_eq!(found(&folder, &h200, 3), None, "too far");
    assert_eq!(found(&folder, &toy("h100"), 16), None, "another GPU");
    let mut other = toy("h200");
    other.model.graph.vocab += 8;
    assert_eq!(found(&folder, &other, 16), None, "another shape");
    let mut codes = toy("h200");
    let matrix = codes.model.graph.tensors.iter_mut().last().unwrap();
    matrix.dtype = ir::DType::Int4G128;
    assert_eq!(found(&folder, &codes, 16), None, "weights of another element type");
    let mut renamed = toy("h200");
    renamed.model.graph.name = "theirs".to_owned();
    assert_eq!(found(&folder, &renamed, 16), Some(short), "names mean nothing");
}

#[test]
fn the_faster_of_two_of_a_kind_stays() {
    let home = tempfile::tempdir().unwrap();
    let h200 = toy("h200");
    for us in [10.0, 8.0, 9.0] {
        kept(home.path(), &entry(&h200, 16, us));
    }
    let best = found(home.path(), &h200, 16).expect("one is kept");
    assert!((best.latency_us - 8.0).abs() < 1e-9);
    assert_eq!(entries(home.path()).len(), 1);
}

#[test]
fn a_schedule_of_another_kernel_is_ignored_and_said() {
    let home = tempfile::tempdir().unwrap();
    let h200 = toy("h200");
    let old = Entry { kernel_id: "0123456789abcdef".to_owned(), ..entry(&h200, 16, 9.0) };
    kept(home.path(), &old);
    let (best, notes) = nearest_in(home.path(), &h200, 16, 1);
    assert_eq!(best, None);
    assert!(notes[0].contains("measured with kernel 0123456789abcdef"), "{notes:?}");
}

#[test]
fn a_schedule_for_several_sequences_is_found_for_as_many() {
    let home = tempfile::tempdir().unwrap();
    let (one, eight) = (toy("h200"), Context { batch: 8, ..toy("h200") });
    kept(home.path(), &entry(&one, 16, 9.0));
    let of_eight = entry(&eight, 16, 12.0);
    assert_ne!(of_eight.kernel_id, entry(&one, 16, 9.0).kernel_id);
    kept(home.path(), &of_eight);
    for (batch, us) in [(1, Some(9.0)), (2, None), (8, Some(12.0))] {
        let (best, notes) = nearest_in(home.path(), &one, 16, batch);
        assert_eq!(best.map(|(_, entry)| entry.latency_us), us, "{batch}");
        assert_eq!(notes, Vec::<String>::new(), "none is of another kernel");
    }
}

#[test]
fn garbage_in_the_folder_is_ignored_and_said() {
    let home = tempfile::tempdir().unwrap();
    let h200 = toy("h200");
    let good = entry(&h200, 16, 9.0);
    kept(home.path(), &good);
    let write = |name: &str, text: &[u8]| std::fs::write(home.path().join(name), text).unwrap();
    write("a.json", b"\xff\xfe");
    write("b.json", b"{\"schema\": \"amk.found.v1\"");
    write("c.json", &vec![b' '; 1 << 17]);
    let mut illegal = entry(&h200, 16, 1.0);
    illegal.config["pipeline"]["stages"] = 1_000_000.into();
    write("d.json", serde_json::to_string(&illegal).unwrap().as_bytes());
    let foreign = Entry { schema: "amk.found.v9".to_owned(), ..entry(&h200, 16, 1.0) };
    write("e.json", serde_json::to_string(&foreign).unwrap().as_bytes());
    write("f.json.99.partial", b"cut o");
    std::fs::create_dir(home.path().join("g.json")).unwrap();
    let (best, notes) = nearest_in(home.path(), &h200, 16, 1);
    assert_eq!(best.map(|(_, entry)| entry), Some(good));
    assert_eq!(notes.len(), 6, "{notes:?}");
    assert!(notes[3].contains("S-RANGE"), "{notes:?}");
}

#[test]
fn writers_at_once_leave_whole_files() {
    let home = tempfile::tempdir().unwrap();
    let h200 = toy("h200");
    std::thread::scope(|scope| {
        for writer in 0..4_u32 {
            let (h200, folder) = (&h200, home.path());
            scope.spawn(move || {
                for round in 0..8 {
                    kept(folder, &entry(h200, 16, f64::from(100 - 8 * writer - round)));
                }
            });
        }
        for _ in 0..32 {
            let (_, notes) = nearest_in(home.path(), &h200, 16, 1);
            assert_eq!(notes, Vec::<String>::new(), "a file appears whole or not at all");
        }
    });
    assert!(found(home.path(), &h200, 16).is_some());
    let names = std::fs::read_dir(home.path()).unwrap();
    assert_eq!(names.count(), 1, "nothing partial is left");
}
