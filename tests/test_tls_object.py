"""One object for certificates and trust: real handshakes, real files, and what faulty files are told."""

import ssl
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from muxkit import TLS

AUTHORITY = trustme.CA()
OTHER = trustme.CA()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with `cert.pem`, `key.pem`, `both.pem`, `ca.pem`, `mine.pem` (a client's) and `other.pem`."""
    issue(tmp_path, "server.test")
    AUTHORITY.issue_cert("client@users.test").private_key_and_cert_chain_pem.write_to_path(tmp_path / "mine.pem")
    OTHER.issue_cert("server.test").private_key_and_cert_chain_pem.write_to_path(tmp_path / "other.pem")
    AUTHORITY.cert_pem.write_to_path(tmp_path / "ca.pem")
    return tmp_path


def issue(folder: Path, name: str) -> None:
    leaf = AUTHORITY.issue_cert(name)
    leaf.private_key_and_cert_chain_pem.write_to_path(folder / "both.pem")
    leaf.private_key_pem.write_to_path(folder / "key.pem")
    (folder / "cert.pem").write_bytes(b"".join(each.bytes() for each in leaf.cert_chain_pems))


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, name: str = "server.test") -> ssl.SSLObject:
    """Do a handshake in memory, and pass what the client says afterwards; return the server's side."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname=name)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    done = {ours: False, theirs: False}
    for _ in range(10):
        for side in done:
            try:
                side.do_handshake()
                done[side] = True
            except ssl.SSLWantReadError:
                pass
    assert all(done.values())
    return theirs


def test_a_client_trusts_the_authority_that_it_was_given(files: Path) -> None:
    server = TLS(cert=files / "cert.pem", key=files / "key.pem")
    client = TLS(ca=files / "ca.pem")
    assert shake_hands(client.client_context(), server.server_context()).version() == "TLSv1.3"
    shake_hands(TLS(ca=AUTHORITY.cert_pem.bytes()).client_context(), TLS(files / "both.pem").server_context())


def test_a_client_refuses_another_authority_another_name_and_by_default_what_the_system_does_not_know(
    files: Path,
) -> None:
    server = TLS(files / "both.pem").server_context()
    with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer"):
        shake_hands(TLS(ca=OTHER.cert_pem.bytes()).client_context(), server)
    with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer"):
        shake_hands(TLS().client_context(), server)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake_hands(TLS(ca=files / "ca.pem").client_context(), server, "another.test")
    shake_hands(TLS(verify=False).client_context(), server, "another.test")


def test_a_server_with_client_ca_accepts_only_clients_of_that_authority(files: Path) -> None:
    server = TLS(files / "both.pem", client_ca=files / "ca.pem").server_context()
    shown = shake_hands(TLS(files / "mine.pem", ca=files / "ca.pem").client_context(), server).getpeercert()
    assert shown is not None
    assert shown["subjectAltName"] == (("email", "client@users.test"),)
    with pytest.raises(ssl.SSLError, match=r"(?i)did not return a certificate"):
        shake_hands(TLS(ca=files / "ca.pem").client_context(), server)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(TLS(files / "other.pem", ca=files / "ca.pem").client_context(), server)


def test_files_that_were_renewed_count_for_the_next_handshake_only(files: Path) -> None:
    server = TLS(files / "cert.pem", files / "key.pem")
    client = TLS(ca=files / "ca.pem").client_context()
    before = server.server_context()
    issue(files, "renewed.test")
    shake_hands(client, server.server_context(), "server.test")
    server.reload()
    assert server.generation == 1
    shake_hands(client, server.server_context(), "renewed.test")
    shake_hands(client, before, "server.test")


def test_files_that_are_faulty_when_read_again_change_nothing(files: Path) -> None:
    server = TLS(files / "cert.pem", files / "key.pem")
    (files / "key.pem").write_bytes(OTHER.issue_cert("x.test").private_key_pem.bytes())
    with pytest.raises(ValueError, match="the key doesn't belong to the certificate"):
        server.reload()
    assert server.generation == 0
    shake_hands(TLS(ca=files / "ca.pem").client_context(), server.server_context())


def test_an_encrypted_key_needs_its_password(files: Path) -> None:
    key = load_pem_private_key((files / "key.pem").read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"tea"))
    (files / "key.pem").write_bytes(locked)
    tls = TLS(files / "cert.pem", files / "key.pem", password="tea")
    shake_hands(TLS(ca=files / "ca.pem").client_context(), tls.server_context())
    assert "tea" not in repr(tls)
    with pytest.raises(
        ValueError, match=r"TLS\(cert='.*cert.pem', key='.*key.pem'\): the key is encrypted; pass password="
    ):
        TLS(files / "cert.pem", files / "key.pem")
    with pytest.raises(ValueError, match="the password of the key is wrong"):
        TLS(files / "cert.pem", files / "key.pem", password="coffee")


def test_faulty_files_are_named(files: Path) -> None:
    with pytest.raises(ValueError, match=r"TLS\(cert='nowhere.pem'\): no such file or directory"):
        TLS("nowhere.pem")
    with pytest.raises(ValueError, match=r"TLS\(key='.*': no such file|TLS\(key='nowhere.pem'\): no such file"):
        TLS(files / "cert.pem", "nowhere.pem")
    with pytest.raises(ValueError, match=r"TLS\(ca='nowhere.pem'\): no such file or directory"):
        TLS(ca="nowhere.pem")
    (files / "text.pem").write_text("not a certificate")
    with pytest.raises(ValueError, match=r"TLS\(cert='.*text.pem'\): expected a certificate and its key in PEM"):
        TLS(files / "text.pem")
    with pytest.raises(ValueError, match=r"TLS\(ca='.*text.pem'\): expected certificates in PEM, found none"):
        TLS(ca=files / "text.pem")
    with pytest.raises(ValueError, match=r"TLS\(ca=…\): expected certificates in PEM, found none"):
        TLS(ca=b"not a certificate")


def test_what_cannot_be_meant_is_refused(files: Path) -> None:
    with pytest.raises(ValueError, match="a key needs its certificate"):
        TLS(key=files / "key.pem")
    with pytest.raises(ValueError, match="only a server verifies clients"):
        TLS(client_ca=files / "ca.pem")
    with pytest.raises(ValueError, match="ca has no effect with verify=False"):
        TLS(ca=files / "ca.pem", verify=False)
    with pytest.raises(ValueError, match=r"tls=muxkit.TLS\(cert='cert.pem', key='key.pem'\)"):
        TLS(ca=files / "ca.pem").server_context()
