package doctor

import (
	"context"
	"errors"
)

var subnets = same(Check{ID: "subnets", Source: "network interfaces", Hazard: "NCCL's interfaces of the hosts are in different networks."}, Warn,
	"traffic between the hosts goes through a router, or another network than intended", "set NCCL_SOCKET_IFNAME on each host to the interface of the common network",
	func(_ context.Context, h *Host) (string, error) {
		chosen, err := h.chosen()
		switch {
		case err != nil:
			return "", err
		case len(chosen) == 0:
			return "", errors.New("NCCL has no interface (see ifname)")
		}
		return "network " + chosen[0].Addrs[0].Masked().String(), nil
	})
