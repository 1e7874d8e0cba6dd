package doctor

import (
	"net/netip"
	"testing"
)

func TestHostname(t *testing.T) {
	try(t, hostname,
		change{"Debian", func(w *world) { w.names["node1"] = loop; w.Env["CHORUS_SEEDS"] = "node0:29477"; w.names["node0"] = far }, Warn, "node1 is 127.0.1.1"},
		change{"Debian alone", func(w *world) { w.names["node1"] = loop }, Pass, "must not use as a seed"},
		change{"a seed on the loopback", func(w *world) { w.names["node1"] = loop; w.Env["CHORUS_SEEDS"] = "node1" }, Fail, "the seed node1 is 127.0.1.1"},
		change{"an unknown seed", func(w *world) { w.Env["CHORUS_SEEDS"] = "node7:1, node1" }, Fail, "the seed node7"},
		change{"an unknown name", func(w *world) { w.names = nil }, Unknown, "no such host"},
	)
}

var (
	loop = []netip.Addr{netip.MustParseAddr("127.0.1.1")}
	far  = []netip.Addr{netip.MustParseAddr("10.0.0.1")}
)
