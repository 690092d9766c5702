//! Splits a line into words.

use super::ParseError;

/// A word of a line, where it begins, and whether it was quoted.
#[derive(Clone, Debug)]
pub(super) struct Word {
    pub(super) text: String,
    pub(super) column: u32,
    pub(super) quoted: bool,
}

/// The words of one line, comment and white space removed.
pub(super) fn words(line: &str, number: u32) -> Result<Vec<Word>, ParseError> {
    let mut words = Vec::new();
    let mut chars = line.chars().zip(1_u32..).peekable();
    while let Some(&(c, column)) = chars.peek() {
        match c {
            ';' => break,
            c if c.is_whitespace() => {
                chars.next();
            }
            '"' => {
                chars.next();
                let text = quoted(&mut chars).ok_or_else(|| ParseError {
                    line: number,
                    column,
                    message: "this string does not end, or has a bad escape".into(),
                })?;
                words.push(Word { text, column, quoted: true });
            }
            _ => {
                let mut text = String::new();
                while let Some((c, _)) =
                    chars.next_if(|&(c, _)| !c.is_whitespace() && c != ';' && c != '"')
                {
                    text.push(c);
                }
                words.push(Word { text, column, quoted: false });
            }
        }
    }
    Ok(words)
}

/// The rest of a string literal, its closing quote included.
fn quoted(chars: &mut impl Iterator<Item = (char, u32)>) -> Option<String> {
    let mut text = String::new();
    loop {
        match chars.next()?.0 {
            '"' => return Some(text),
            '\\' => match chars.next()?.0 {
                c @ ('"' | '\\') => text.push(c),
                'n' => text.push('\n'),
                'u' => {
                    if chars.next()?.0 != '{' {
                        return None;
                    }
                    let digits: String =
                        chars.by_ref().map(|(c, _)| c).take_while(|&c| c != '}').take(7).collect();
                    text.push(u32::from_str_radix(&digits, 16).ok().and_then(char::from_u32)?);
                }
                _ => return None,
            },
            c => text.push(c),
        }
    }
}
