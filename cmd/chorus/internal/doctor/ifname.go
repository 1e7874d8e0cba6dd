package doctor

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

var ifname = &Check{
	ID: "ifname", Scope: ScopeHost, Source: "network interfaces, NCCL_SOCKET_IFNAME",
	Hazard: "NCCL connects hosts by a wrong network interface, or finds none.",
	Run:    one(checkIfname),
}

// inner are prefixes of interfaces that other hosts do not reach.
var inner = []string{"lo", "docker", "veth", "virbr", "cni"}

func checkIfname(h *Host) Result {
	all, err := h.usable()
	if err != nil {
		return unread(err)
	}
	chosen, err := h.chosen()
	if err != nil {
		return unread(err)
	}
	const want = "an interface that other hosts reach"
	if len(chosen) == 0 {
		return fail(fmt.Sprintf("NCCL_SOCKET_IFNAME=%s matches none of %s", h.getenv("NCCL_SOCKET_IFNAME"), joined(all)), want, "NCCL's start fails", cureIfname(all))
	}
	found := "NCCL uses " + joined(chosen)
	x := chosen[0]
	switch {
	case hasPrefix(x.Name, inner):
		return warn(found, want, "other hosts do not reach this interface, so NCCL waits until its timeout", cureIfname(all))
	case x.Addrs[0].Addr().IsLinkLocalUnicast() && x.Addrs[0].Addr().Is4():
		return warn(found+" with the address "+x.Addrs[0].String(), want, "the interface has no address of the network", cureIfname(all))
	}
	return pass(found, want)
}

// chosen returns the interfaces that NCCL uses.
func (h *Host) chosen() ([]Interface, error) {
	all, err := h.usable()
	if err != nil {
		return nil, err
	}
	settings, err := h.ncclSettings()
	if err != nil {
		return nil, err
	}
	if s := settings["NCCL_SOCKET_IFNAME"]; s.value != "" {
		return matching(all, s.value), nil
	}
	return byDefault(all), nil
}

// firstChosen returns the first interface that NCCL uses.
func (h *Host) firstChosen() (Interface, error) {
	chosen, err := h.chosen()
	switch {
	case err != nil:
		return Interface{}, err
	case len(chosen) == 0:
		return Interface{}, errors.New("NCCL has no interface (see ifname)")
	}
	return chosen[0], nil
}

// usable returns the interfaces that are up and have an address.
func (h *Host) usable() ([]Interface, error) {
	all, err := h.Interfaces()
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(slices.Clone(all), func(i Interface) bool { return !i.Up || len(i.Addrs) == 0 }), nil
}

// matching returns the interfaces that a value of NCCL_SOCKET_IFNAME selects: a list of prefixes,
// of names after "=", or of prefixes to exclude after "^".
func matching(all []Interface, value string) (out []Interface) {
	list, exclude := strings.CutPrefix(value, "^")
	list, exact := strings.CutPrefix(list, "=")
	names := strings.Split(list, ",")
	for _, i := range all {
		hit := exact && slices.Contains(names, i.Name) || !exact && hasPrefix(i.Name, names)
		if hit != exclude {
			out = append(out, i)
		}
	}
	return out
}

// byDefault returns NCCL's choice without the variable: ib*, then all but docker* and lo*, then
// docker*, then lo*.
func byDefault(all []Interface) []Interface {
	for _, value := range []string{"ib", "^docker,lo", "docker", "lo"} {
		if list := matching(all, value); len(list) > 0 {
			return list
		}
	}
	return all
}

func hasPrefix(name string, prefixes []string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(name, p) })
}

func joined(list []Interface) string {
	if len(list) == 0 {
		return "no interface"
	}
	names := make([]string, len(list))
	for i, x := range list {
		names[i] = x.Name
	}
	return strings.Join(names, ", ")
}

// cureIfname names the first interface that other hosts may reach.
func cureIfname(all []Interface) string {
	for _, i := range all {
		if !hasPrefix(i.Name, inner) {
			return "set NCCL_SOCKET_IFNAME==" + i.Name
		}
	}
	return "give the host a network interface with an address"
}
