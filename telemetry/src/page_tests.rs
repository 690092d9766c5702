//! The page between processes: consistent, live, of another version, torn, and its cost.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::*;

/// An allocator that counts the allocations of this thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: it only counts; the system allocator does the rest.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Number of allocations of this thread in `work`.
fn allocations(work: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.with(Cell::get);
    work();
    ALLOCATIONS.with(Cell::get) - before
}

fn start(edit: &mut Edit<'_>) {
    edit.command("test", "toy");
    edit.device("cpu");
    edit.head().workers = 4;
}

fn page() -> (tempfile::TempDir, Folder, Publisher) {
    let home = tempfile::tempdir().unwrap();
    let folder = Folder::at(&home.path().join("amk"));
    let (publisher, why) = Publisher::new(&folder, start).unwrap();
    assert!(why.is_none(), "{why:?}");
    (home, folder, publisher)
}

#[test]
fn another_reader_sees_what_was_written_and_neither_allocates() {
    let (_home, folder, publisher) = page();
    let found = folder.living();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].pid, std::process::id());
    let reader = Reader::open(&found[0].path).unwrap();
    let mut seen = Page::boxed();
    let written = allocations(|| {
        publisher.edit(|edit| {
            edit.head().tokens = 17;
            edit.session(63).serial = 5;
            edit.workers()[3].progress = 9;
        });
    });
    let read = allocations(|| reader.read(&mut seen).unwrap());
    assert_eq!((written, read), (0, 0));
    assert!(allocations(|| drop(std::hint::black_box(Box::new(1)))) > 0, "the counter counts");
    assert_eq!(
        (seen.head.tokens, seen.sessions[63].serial, seen.running()[3].progress),
        (17, 5, 9)
    );
    assert_eq!(seen.open().map(|(place, _)| place).collect::<Vec<_>>(), [63]);
    assert_eq!((text(&seen.head.model), seen.head.pid), ("toy".to_owned(), std::process::id()));
    assert_eq!(seen.head.writes, 2);
    assert!(seen.head.write_ns > 0, "the first write is on the account of the second");
    let path = found[0].path.clone();
    drop(publisher);
    assert!(!path.exists());
    reader.read(&mut seen).unwrap();
    assert_eq!(seen.head.activity, Activity::Ended as u32, "who mapped it before learns the end");
}

#[test]
fn no_reader_sees_half_a_change_and_none_holds_the_writer_up() {
    let (_home, folder, publisher) = page();
    let path = folder.page(std::process::id());
    let over = AtomicBool::new(false);
    let reads = std::thread::scope(|scope| {
        let read = || {
            let reader = Reader::open(&path).unwrap();
            let (mut seen, mut reads) = (Page::boxed(), 0_u64);
            while !over.load(Ordering::Relaxed) {
                reader.read(&mut seen).unwrap();
                let value = seen.head.tokens;
                assert_eq!(seen.sessions[7].tokens, value);
                assert_eq!(u64::from(seen.workers[3].progress), value);
                reads += 1;
            }
            reads
        };
        let readers = [scope.spawn(read), scope.spawn(read)];
        for value in 0..20_000_u32 {
            publisher.edit(|edit| {
                edit.head().tokens = value.into();
                edit.session(7).tokens = value.into();
                edit.workers()[3].progress = value;
            });
            if value % 100 == 0 {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        over.store(true, Ordering::Relaxed);
        readers.map(|reader| reader.join().unwrap())
    });
    assert!(reads.iter().all(|reads| *reads > 10), "{reads:?}");
}

#[test]
fn what_is_no_page_is_refused_with_the_reason() {
    let (home, folder, publisher) = page();
    let good = std::fs::read(folder.page(std::process::id())).unwrap();
    let path = home.path().join("x");
    let opened = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        Reader::open(&path).err()
    };
    assert!(opened(&good).is_none());
    assert!(matches!(opened(&[]), Some(Unreadable::Foreign)));
    assert!(matches!(opened(&[0; 4096]), Some(Unreadable::Foreign)));
    assert!(matches!(opened(&good[..100]), Some(Unreadable::Version { .. })));
    let mut other = good.clone();
    other[8] = 9;
    let refused = opened(&other).unwrap().to_string();
    let reads = format!("reads version {TELEMETRY_VERSION} ");
    assert!(refused.contains("version 9") && refused.contains(&reads), "{refused}");
    // The process died during a write: the sequence stays odd, and the reader gives up.
    let mut torn = good;
    torn[SEQUENCE * WORD_BYTES] |= 1;
    assert!(opened(&torn).is_none());
    let read = Reader::open(&path).unwrap().read(&mut Page::boxed());
    assert!(matches!(read, Err(Unreadable::Torn)), "{read:?}");
    drop(publisher);
}

#[test]
fn without_a_folder_the_page_is_this_process_s_own() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("file");
    std::fs::write(&file, "").unwrap();
    let (publisher, why) = Publisher::new(&Folder::at(&file), start).unwrap();
    assert!(why.is_some());
    assert_eq!(publisher.path(), None);
    publisher.edit(|edit| edit.head().tokens = 3);
    let mut seen = Page::boxed();
    publisher.reader().read(&mut seen).unwrap();
    assert_eq!(seen.head.tokens, 3);
}

#[test]
fn texts_are_cut_between_characters_and_shown_without_controls() {
    let mut out = [1; 4];
    put(&mut out, "aé日");
    assert_eq!(text(&out), "aé");
    assert_eq!(text(b"a\x1b[2Jb\0c"), "a[2Jb");
    assert_eq!(text(&[0xff, b'x']), "\u{fffd}x");
}
