//! What a running machine says of itself. The process that owns the machine writes a page ([`Publisher`]); others map it and read
//! ([`Reader`]), as often as they like.
//!
//! **Promises.**
//!
//! - A reader gets a whole state or none: the words change under a sequence that it checks ([`Reader::read`]). It maps the page for
//!   reading only and takes no lock, so nothing that it does is felt by the writer.
//! - Reading allocates nothing, and every loop in it is bounded. What a page says is believed only after its length, magic and version.
//! - Writing allocates nothing, never waits for a reader, and says what it costs (`write_ns`).
//! - Whatever cannot be written is no error of the work that it is about: without a folder the page is this process's own.

mod find;
mod openmetrics;
mod page;
mod rates;
mod sequence;
mod stalls;
mod steps;

pub use find::{Folder, Found, folder};
pub use openmetrics::openmetrics;
pub use page::{Edit, Page, Publisher, Reader, Unreadable, now_ns, text};
pub use rates::{Rates, Shares};
pub use stalls::{Stalls, Suspect};
pub use steps::{BUCKETS, bucket, quantile_ns, upper_ns};
