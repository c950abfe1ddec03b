//! Metadata of descriptors.

use crate::error::Position;
use crate::tree::{Node, NodeValue};

/// Names and values, in file order.
pub type Metadata = Vec<(String, Data)>;

/// A JSON value.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// Null.
    Null,
    /// A boolean.
    Bool(bool),
    /// A number. No decision depends on it.
    Number(f64),
    /// A text.
    Text(String),
    /// A list.
    List(Vec<Data>),
    /// A mapping.
    Map(Metadata),
}

/// Converts a node to data. Returns the position of a name that is not a word.
pub(super) fn of(node: &Node) -> Result<Data, Position> {
    Ok(match &node.value {
        NodeValue::Nothing => Data::Null,
        NodeValue::Word(word) if node.is_text => Data::Text(word.clone()),
        NodeValue::Word(word) => plain(word),
        NodeValue::List(items) => Data::List(items.iter().map(of).collect::<Result<_, _>>()?),
        NodeValue::Map(entries) => {
            let mut map = Vec::new();
            for (name, node) in entries {
                let NodeValue::Word(name_typed) = &name.value else { return Err(name.position) };
                map.push((name_typed.clone(), of(node)?));
            }
            Data::Map(map)
        }
    })
}

/// Converts a YAML number or boolean. Numbers that JSON does not have stay text.
fn plain(word: &str) -> Data {
    let in_base = |prefix, base| word.strip_prefix(prefix).and_then(|it| u32::from_str_radix(it, base).ok());
    let number = in_base("0x", 16).or(in_base("0o", 8)).map(f64::from).or_else(|| word.parse().ok());
    match (word.to_ascii_lowercase().as_str(), number) {
        ("true", _) => Data::Bool(true),
        ("false", _) => Data::Bool(false),
        (_, Some(number)) if number.is_finite() => Data::Number(number),
        _ => Data::Text(word.to_owned()),
    }
}
