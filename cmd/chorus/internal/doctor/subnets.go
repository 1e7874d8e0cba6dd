package doctor

import "context"

var subnets = same(Check{ID: "subnets", Source: "network interfaces", Hazard: "NCCL's interfaces of the hosts are in different networks."}, Warn,
	"traffic between the hosts goes through a router, or another network than intended", "set NCCL_SOCKET_IFNAME on each host to the interface of the common network",
	func(_ context.Context, h *Host) (string, error) {
		i, err := h.firstChosen()
		if err != nil {
			return "", err
		}
		return "network " + i.Addrs[0].Masked().String(), nil
	})
