//! The picture of engines: one bar for each element of a list, shorter is better.

use std::fmt::Write as _;

use super::{Item, Number, Reader};

const BAR: usize = 34;
const LABEL: f64 = 330.0;
const WIDTH: f64 = 900.0;

struct Bar {
    engine: String,
    us: f64,
    note: String,
    number: Number,
}

impl Reader<'_> {
    /// Reads a picture and draws it again from its list.
    pub(super) fn bars(&mut self, held: &str, list: &str) {
        let items = self.items(list);
        let bars: Result<Vec<Bar>, String> = items.iter().map(|item| self.bar(item)).collect();
        let bars = bars.and_then(|bars| match bars.is_empty() {
            true => Err(format!("{list} has no evidence")),
            false => Ok(bars),
        });
        let mut bars = match bars {
            Ok(bars) => bars,
            Err(reason) => {
                let number = Number { line: 1, reason: Some(reason), ..Number::default() };
                (self.page.numbers, self.page.text) = (vec![number], held.to_owned());
                return;
            }
        };
        self.page.text = draw(&bars, list);
        for bar in &mut bars {
            let text = format!("{:.0}", bar.us);
            let row = format!(">{}</text>", bar.engine);
            // The figure is on the second line after the engine's name.
            let at =
                self.page.text.lines().position(|line| line.ends_with(&row)).map_or(0, |at| at + 2);
            let shown = held.lines().nth(at).and_then(|line| {
                line.split_once("\">")?.1.split_once(" <tspan").map(|(us, _)| us.to_owned())
            });
            bar.number.line = at + 1;
            bar.number.shown = shown.unwrap_or_default();
            bar.number.expected = Some(text);
        }
        self.page.numbers = bars.into_iter().map(|bar| bar.number).collect();
        if self.page.text != held && self.page.numbers.iter().all(Number::is_right) {
            let (shown, expected) = ("the picture".to_owned(), Some("another picture".to_owned()));
            let from = vec![list.to_owned()];
            self.page.numbers.push(Number { line: 1, shown, expected, from, reason: None });
        }
    }

    fn bar(&self, item: &Item) -> Result<Bar, String> {
        let mut number = Number::default();
        let us = self.find(item, "/us")?;
        number.from.push(us.0);
        let us = us.1.as_f64().ok_or_else(|| format!("{} is no number", number.from[0]))?;
        let word = |pointer| self.term(item, pointer, &mut Vec::new());
        Ok(Bar { engine: word("/engine")?, us, note: word("/note")?, number })
    }
}

fn draw(bars: &[Bar], list: &str) -> String {
    let longest = bars.iter().map(|bar| bar.us).fold(0.0, f64::max);
    let height = bars.len() * BAR + 70;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"15\">\n\
         <!-- bars from {list} -->\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"10\" y=\"24\" font-size=\"17\">llama-3.2-1b, 16 bits, context 128, one NVIDIA H200: µs per token, less is better</text>\n"
    );
    for (row, Bar { engine, us, note, .. }) in bars.iter().enumerate() {
        let (top, bar) = (row * BAR + 42, us / longest * (WIDTH - LABEL - 270.0));
        let (text, fill) = (top + 19, if engine == "amk" { "#2f7d4f" } else { "#9aa5b1" });
        let _ = writeln!(
            out,
            "<text x=\"10\" y=\"{text}\">{engine}</text>\n\
             <rect x=\"{LABEL}\" y=\"{top}\" width=\"{bar:.0}\" height=\"24\" fill=\"{fill}\"/>\n\
             <text x=\"{:.0}\" y=\"{text}\">{us:.0} <tspan fill=\"#666\" font-size=\"12\">{note}</tspan></text>",
            LABEL + bar + 8.0
        );
    }
    out + "</svg>\n"
}
