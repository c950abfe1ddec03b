//! The functions that decide inside Redis, and their names.

/// The functions in Redis. Their names contain a hash of their text, so different versions can run side by side.
#[derive(Debug)]
pub(crate) struct Library {
    pub(crate) text: String,
    pub(crate) charge: String,
    pub(crate) concurrency: String,
    pub(crate) records: String,
}

impl Library {
    pub(crate) fn new() -> Library {
        let text = concat!(
            include_str!("library.lua"),
            include_str!("concurrency.lua"),
            include_str!("records.lua")
        );
        // FNV-1a, because the hash must never change.
        let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let [charge, concurrency, records] =
            ["", "concurrency_", "records_"].map(|part| format!("ratekeeper_{part}{hash:016x}"));
        let text = text
            .replace("@charge@", &charge)
            .replace("@concurrency@", &concurrency)
            .replace("@records@", &records);
        Library { text: format!("#!lua name={charge}\n{text}"), charge, concurrency, records }
    }
}
