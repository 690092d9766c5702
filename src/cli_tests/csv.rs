//! `bench --csv`: a row for each run, so that a sweep is one file.

use super::{amk_in, folder};

#[test]
fn a_sweep_is_one_file() {
    let dir = folder();
    let bench = |context: &str, file: &str| {
        let what =
            ["bench", "--model", "toy", "--device", "cpu", "--context", context, "--csv", file];
        amk_in(dir.path(), &what)
    };
    let documents = ["8", "16"].map(|context| bench(context, "sweep.csv").succeeds("amk.bench.v1"));
    let text = std::fs::read_to_string(dir.path().join("sweep.csv")).unwrap();
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(lines.len(), 3, "{text}");
    let cell = |row: usize, name: &str| {
        let column = lines[0].iter().position(|cell| *cell == name).unwrap();
        lines[row][column].to_owned()
    };
    for (row, document) in documents.iter().enumerate() {
        assert_eq!(cell(row + 1, "context"), document["context"].to_string());
        assert_eq!(cell(row + 1, "us"), document["us"].to_string());
        assert_eq!(cell(row + 1, "latency_kind"), "predicted");
        assert_eq!(cell(row + 1, "card"), "", "a prediction has no card");
    }
    // What cannot be appended is refused before anything is measured.
    std::fs::write(dir.path().join("other.csv"), "a,b\n1,2\n").unwrap();
    bench("8", "other.csv").fails(2, &["other.csv", "other columns"]);
    bench("8", "no/such.csv").fails(2, &["no/such.csv"]);
}
