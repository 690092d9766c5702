//! The forty questions, which were written before the index, and what a ledger and a page answer.

use std::path::PathBuf;

use super::*;

#[derive(serde::Deserialize)]
struct Asked {
    question: String,
    answers: Vec<Place>,
}

#[derive(serde::Deserialize)]
struct Place {
    file: PathBuf,
    text: String,
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The lines of a passage as they are in its file.
fn passage_of(note: &Note) -> String {
    let text = std::fs::read_to_string(&note.file).expect("the file of a note");
    let lines: Vec<&str> = text.lines().collect();
    lines[note.lines[0] - 1..note.lines[1]].join("\n")
}

/// Of the questions, those without an expected passage among the first `most`.
fn missed(index: &Index<'_>, asked: &[Asked], most: usize) -> Vec<String> {
    let is = |note: &Note, place: &Place| {
        note.file == root().join(&place.file) && passage_of(note).contains(&place.text)
    };
    let hits = |asked: &&Asked| {
        let notes = best(index, &asked.question, most);
        !notes.iter().any(|note| asked.answers.iter().any(|place| is(note, place)))
    };
    asked.iter().filter(hits).map(|asked| asked.question.clone()).collect()
}

#[test]
fn the_questions_that_were_written_first_find_their_answers() {
    let text = std::fs::read_to_string(root().join("tests/notes/questions.json")).expect("a file");
    let asked: Vec<Asked> = serde_json::from_str(&text).expect("questions");
    assert_eq!(asked.len(), 40);
    let mut source = Source::default();
    for place in ["docs/decisions", "docs/lab"] {
        source.read(&root().join(place)).expect("pages");
    }
    let index = Index::of(&source.passages);
    for (most, enough) in [(3, 36), (5, 37)] {
        let missed = missed(&index, &asked, most);
        let found = 40 - missed.len();
        assert!(found >= enough, "recall at {most} is {found} of 40; missed: {missed:#?}");
    }
    for Asked { question, .. } in &asked {
        let notes = best(&index, question, 5);
        assert_eq!(notes.len(), 5, "{question}");
        let first = notes.iter().take_while(|note| note.failure).count();
        assert!(notes[first..].iter().all(|note| !note.failure), "failures come first: {question}");
        let quoted: usize = notes.iter().map(|note| note.text.len()).sum();
        assert!(quoted <= 4096, "{quoted} bytes: {question}");
    }
}

#[test]
fn a_row_of_a_table_is_found_by_its_words_and_by_what_the_table_is_of() {
    let folder = tempfile::tempdir().expect("a folder");
    let page = folder.path().join("page.md");
    let text = "# Kernel\n\n## Tried and not kept\n\n| change | result |\n|---|---|\n| wider tiles | spilled |\n\n\
        ## Today\n\nTiles have eight rows,\nas before.\n";
    std::fs::write(&page, text).expect("a page");
    let ask = |question: &str| {
        let args = NotesArgs { question: question.into(), places: vec![page.clone()], most: 5 };
        answer(&args).expect("an answer")
    };
    let found = ask("tile spills");
    assert_eq!(found.exit, Exit::Yes);
    let notes = &found.document.notes;
    assert_eq!((notes[0].lines, notes[0].failure), ([7, 7], true), "{notes:?}");
    assert_eq!((notes[1].lines, notes[1].failure), ([11, 12], false), "{notes:?}");
    assert_eq!(notes[0].id, format!("{}:7", page.display()));
    assert_eq!(ask("rows 8 eight").document.notes[0].lines, [11, 12]);
    assert_eq!(ask("unheard").exit, Exit::No, "nothing is written about it");
}

/// A page that has a question's words in every line leaves room for others.
#[test]
fn an_answer_has_two_passages_of_a_page_at_most() {
    let folder = tempfile::tempdir().expect("a folder");
    let line = |n: usize| format!("- the ring waits for the ring, and waits again, case {n}\n");
    let long: String = (0..6).map(line).collect();
    std::fs::write(folder.path().join("a.md"), format!("# Ring\n\n{long}")).expect("a page");
    std::fs::write(folder.path().join("b.md"), "# Other\n\nA ring of four stages.\n")
        .expect("a page");
    let places = vec![folder.path().to_path_buf()];
    let args = NotesArgs { question: "ring waits".into(), places, most: 5 };
    let found = answer(&args).expect("an answer").document;
    let pages: Vec<bool> = found.notes.iter().map(|note| note.file.ends_with("a.md")).collect();
    assert_eq!(pages, [true, true, false], "{found:?}");
}

#[test]
fn trials_of_a_ledger_are_notes_and_a_damaged_one_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().join("runs/a");
    let search = crate::library::Search::new("toy").device(crate::DeviceChoice::Cpu);
    let mut rows: Vec<search::Trial> = Vec::new();
    let on_trial = |trial: &search::Trial| {
        rows.push(trial.clone());
        std::ops::ControlFlow::Continue(())
    };
    let budget = search::Budget::Trials(8);
    search.budget(budget).out(&run).on_trial(on_trial).run().expect("a search");
    let ask = |question: &str| {
        let places = vec![folder.path().join("runs")];
        let args = NotesArgs { question: question.into(), places, most: 20 };
        answer(&args).expect("an answer").document
    };
    let text = std::fs::read_to_string(run.join("ledger.jsonl")).expect("a ledger");
    let lines: Vec<&str> = text.lines().collect();
    let mut seen = 0;
    for row in rows.iter().filter(|row| !row.changed.is_empty()) {
        let knob = row.changed.keys().next().expect("a knob");
        let id = format!("{} trial {}", run.display(), row.trial);
        let found = ask(knob);
        let note = found.notes.iter().find(|note| note.id == id).expect("the trial");
        assert_eq!(note.failure, row.outcome != search::Outcome::Kept, "{note:?}");
        assert!(note.text.contains(row.outcome.name()), "{note:?}");
        let record: serde_json::Value =
            serde_json::from_str(lines[note.lines[0] - 1]).expect("a row");
        assert_eq!(
            record.pointer("/record/trial").or(record.get("trial")),
            Some(&row.trial.into())
        );
        seen += 1;
    }
    assert!(seen > 3, "{seen}");
    let row = lines.iter().position(|line| line.contains("\"outcome\"")).expect("a trial");
    let damaged = text.replacen(lines[row], &lines[row].replace("toy", "try"), 1);
    std::fs::write(run.join("ledger.jsonl"), damaged).expect("written");
    let found = ask("toy");
    assert_eq!(found.refused.len(), 1, "{found:?}");
}
