package doctor

import (
	"errors"
	"testing"
)

func TestIfname(t *testing.T) {
	try(t, ifname,
		change{"no match", func(w *world) { w.Env["NCCL_SOCKET_IFNAME"] = "eth" }, Fail, "NCCL_SOCKET_IFNAME==ens3"},
		change{"a prefix", func(w *world) { w.Env["NCCL_SOCKET_IFNAME"] = "eth,ens" }, Pass, "ens3"},
		change{"an exact name", func(w *world) { w.Env["NCCL_SOCKET_IFNAME"] = "=ens" }, Fail, "none of"},
		change{"an exclusion", func(w *world) { w.Env["NCCL_SOCKET_IFNAME"] = "^ens,lo" }, Warn, "NCCL uses docker0"},
		change{"InfiniBand first", func(w *world) { w.nics = append(w.nics, Interface{"ib0", 2044, true, prefixes("10.1.0.7/24")}) }, Pass, "NCCL uses ib0"},
		change{"down", func(w *world) { w.nics[2].Up = false }, Warn, "NCCL uses docker0"},
		change{"no address of the network", func(w *world) { w.nics[2].Addrs = prefixes("169.254.0.7/16") }, Warn, "169.254.0.7/16"},
		change{"no interface", func(w *world) { w.nics = nil }, Fail, "no interface"},
		change{"refused", func(w *world) { w.Interfaces = func() ([]Interface, error) { return nil, errors.New("no netlink") } }, Unknown, "no netlink"},
	)
}
