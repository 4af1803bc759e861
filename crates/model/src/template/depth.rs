//! How deep a template may nest, looked at before it is parsed.
//!
//! `minijinja` bounds brackets and blocks, but not chains: of `a.b.c` and `1 + 1 + 1` it makes trees as deep as they are
//! long, which it compiles and frees by recursion. Every level takes a byte of a tag at least, or a branch.

use super::TemplateError;

/// Bytes of a tag, without the insides of its strings.
const MOST_BYTES: usize = 4096;
/// Branches of all conditions together.
const MOST_BRANCHES: usize = 1000;

/// Refuses templates that nest too deep.
pub(super) fn check(source: &str) -> Result<(), TemplateError> {
    let refused = |at: usize, reason: String| {
        let line = 1 + source.bytes().take(at).filter(|&byte| byte == b'\n').count();
        Err(TemplateError::Syntax { line, reason })
    };
    if let Some((at, _)) = source.match_indices("elif").nth(MOST_BRANCHES) {
        return refused(at, format!("more than {MOST_BRANCHES} `elif`"));
    }
    let mut at = 0;
    while let Some(begin) = source[at..].find('{') {
        let begin = at + begin;
        let behind = source.as_bytes().get(begin + 1);
        at = match behind {
            Some(b'#') => source[begin..].find("#}").map_or(source.len(), |end| begin + end + 2),
            Some(b'{' | b'%') => {
                let (length, end) = tag(&source.as_bytes()[begin + 2..]);
                if length > MOST_BYTES {
                    return refused(begin, format!("a tag of more than {MOST_BYTES} bytes"));
                }
                begin + 2 + end
            }
            _ => begin + 1,
        };
    }
    Ok(())
}

/// Bytes of a tag without its strings, and where it ends.
fn tag(bytes: &[u8]) -> (usize, usize) {
    let (mut length, mut braces, mut at) = (0, 0, 0);
    while let Some(&byte) = bytes.get(at) {
        at += 1;
        length += 1;
        match byte {
            b'"' | b'\'' => at += string(&bytes[at..], byte),
            b'{' => braces += 1,
            b'}' if braces > 0 => braces -= 1,
            b'}' | b'%' if bytes.get(at) == Some(&b'}') => return (length, at + 1),
            _ => {}
        }
    }
    (length, at)
}

/// Bytes of a string up to behind its closing quote.
fn string(bytes: &[u8], quote: u8) -> usize {
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        at += if byte == b'\\' { 2 } else { 1 };
        if byte == quote {
            break;
        }
    }
    at.min(bytes.len())
}
