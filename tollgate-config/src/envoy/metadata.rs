//! What a descriptor sends along.

/// Names and what stands behind them, in the order of the file.
pub type Metadata = Vec<(String, Data)>;

/// What JSON can say.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// Nothing.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A number, which nothing here is decided by.
    Number(f64),
    /// A text.
    Text(String),
    /// One after the other.
    List(Vec<Data>),
    /// By name.
    Map(Metadata),
}
