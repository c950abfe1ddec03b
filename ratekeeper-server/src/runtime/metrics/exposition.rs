//! The text format of Prometheus. The crate `prometheus-client` writes only that of OpenMetrics, does not check labels, and
//! an adapter to it is as long as this file.

use std::fmt::{self, Write};

use super::families::Family;

/// Microseconds, displayed as seconds.
pub(super) struct Seconds(pub(super) u64);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{}.{:06}", self.0 / 1_000_000, self.0 % 1_000_000);
        f.write_str(text.trim_end_matches('0').trim_end_matches('.'))
    }
}

/// Metrics in the text format of Prometheus.
#[derive(Debug, Default)]
pub struct Exposition(String);

impl Exposition {
    /// Writes the header of a metric family. Its samples are written through the result, so that none is without a
    /// header, and each has the labels of its family.
    pub(crate) fn family<const N: usize>(&mut self, family: &'static Family<N>) -> FamilyWriter<'_, N> {
        let Family { name, kind, help, .. } = family;
        debug_assert!(!self.0.contains(&format!("# TYPE {name} ")), "{name} has two writers");
        // Writing into a string cannot fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
        FamilyWriter { family, out: &mut self.0 }
    }

    /// Writes a family with one sample and no labels.
    pub(crate) fn single(&mut self, family: &'static Family<0>, value: impl fmt::Display) {
        self.family(family).sample([], value);
    }

    /// The text written so far.
    pub fn into_text(self) -> String {
        self.0
    }
}

/// Writes the samples of a family.
pub(crate) struct FamilyWriter<'a, const N: usize> {
    family: &'static Family<N>,
    out: &'a mut String,
}

impl<const N: usize> FamilyWriter<'_, N> {
    /// Writes one sample, with the values of the family's labels in their order.
    pub(crate) fn sample(&mut self, values: [&str; N], value: impl fmt::Display) {
        debug_assert_ne!(self.family.kind, "histogram", "{}", self.family.name);
        self.line("", values, None, value);
    }

    /// Writes the samples of a histogram: the counts of its buckets by their upper bounds, and the sum.
    pub(super) fn histogram(
        &mut self,
        values: [&str; N],
        buckets: impl Iterator<Item = (String, u64)>,
        sum: Seconds,
    ) {
        debug_assert_eq!(self.family.kind, "histogram", "{}", self.family.name);
        let mut count = 0;
        for (end, in_bucket) in buckets {
            count += in_bucket;
            self.line("_bucket", values, Some(("le", &end)), count);
        }
        self.line("_sum", values, None, sum);
        self.line("_count", values, None, count);
    }

    fn line(
        &mut self,
        suffix: &str,
        values: [&str; N],
        last: Option<(&str, &str)>,
        value: impl fmt::Display,
    ) {
        let Family { name, labels, .. } = self.family;
        debug_assert!(labels.iter().zip(values).all(|(label, it)| label.allows(it)), "{name} {values:?}");
        let _ = write!(self.out, "{name}{suffix}");
        let mut opening = '{';
        for (label, text) in labels.iter().map(|label| label.name).zip(values).chain(last) {
            let text = text.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n");
            let _ = write!(self.out, "{opening}{label}=\"{text}\"");
            opening = ',';
        }
        let _ = writeln!(self.out, "{} {value}", if opening == ',' { "}" } else { "" });
    }
}
