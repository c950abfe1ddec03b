//! The PROXY protocol: the proxy in front sends the client's address before the client's first byte.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tokio::io::{AsyncRead, AsyncReadExt};

const V2_SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
const V1_BYTES_MAX: usize = 107;
/// Addresses and optional fields.
const V2_BYTES_MAX: usize = 4096;

fn invalid_header() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "invalid PROXY header")
}

/// Reads the header and nothing after it. None if the proxy sends no client address, as in its health checks.
pub(crate) async fn read(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<IpAddr>> {
    let mut begin = [0; V2_SIGNATURE.len()];
    stream.read_exact(&mut begin).await?;
    match begin == V2_SIGNATURE {
        true => read_v2(stream).await,
        false if begin.starts_with(b"PROXY ") => read_v1(stream, &begin).await,
        false => Err(invalid_header()),
    }
}

async fn read_v1(stream: &mut (impl AsyncRead + Unpin), begin: &[u8]) -> io::Result<Option<IpAddr>> {
    let mut line = begin.to_vec();
    // Byte by byte: data after the line belongs to the client.
    while !line.ends_with(b"\r\n") {
        if line.len() >= V1_BYTES_MAX {
            return Err(invalid_header());
        }
        line.push(stream.read_u8().await?);
    }
    let line = std::str::from_utf8(&line).map_err(|_| invalid_header())?;
    let mut words = line.trim_end_matches("\r\n").split(' ').skip(1);
    let (family, source) = (words.next(), words.next());
    match (family, source.map(str::parse::<IpAddr>)) {
        (Some("UNKNOWN"), _) => Ok(None),
        (Some("TCP4"), Some(Ok(source @ IpAddr::V4(_))))
        | (Some("TCP6"), Some(Ok(source @ IpAddr::V6(_)))) => {
            // The destination address and both ports follow.
            if words.count() == 3 { Ok(Some(source)) } else { Err(invalid_header()) }
        }
        _ => Err(invalid_header()),
    }
}

async fn read_v2(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<IpAddr>> {
    let (command, family) = (stream.read_u8().await?, stream.read_u8().await?);
    let length = usize::from(stream.read_u16().await?);
    if length > V2_BYTES_MAX || command >> 4 != 2 {
        return Err(invalid_header());
    }
    let mut rest = vec![0; length];
    stream.read_exact(&mut rest).await?;
    match (command & 0xf, family >> 4) {
        (0, _) => Ok(None),
        (1, 0) => Ok(None),
        (1, 1) => {
            let source: [u8; 4] =
                rest.get(..4).and_then(|it| it.try_into().ok()).ok_or_else(invalid_header)?;
            Ok(Some(IpAddr::V4(Ipv4Addr::from(source))))
        }
        (1, 2) => {
            let source: [u8; 16] =
                rest.get(..16).and_then(|it| it.try_into().ok()).ok_or_else(invalid_header)?;
            Ok(Some(IpAddr::V6(Ipv6Addr::from(source))))
        }
        _ => Err(invalid_header()),
    }
}
