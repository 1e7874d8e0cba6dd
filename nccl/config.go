package nccl

import (
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// Config are the options of a communicator (ncclConfig_t); nil means that NCCL
// chooses everything. A nil field is left to NCCL too. An option that is newer
// than the loaded NCCL is a *device.UnsupportedError: NCCL itself would ignore
// it in silence.
type Config struct {
	CGAClusterSize *int   // thread blocks in a cluster, 0 to 8; NCCL 2.17
	MinCTAs        *int   // thread blocks of a kernel at least, 1 to 64; NCCL 2.17
	MaxCTAs        *int   // thread blocks of a kernel at most, 1 to 64; NCCL 2.17
	NetName        string // the network plugin to use; NCCL 2.17
	SplitShare     *bool  // children of Split share resources; NCCL 2.18
	TrafficClass   *int   // of the network; NCCL 2.26
	Name           string // shown in NCCL's logs; NCCL 2.27
	CollNet        *bool  // in-network reduction; NCCL 2.27
	CTAPolicy      *int   // 0 default, 1 efficiency, 2 zero; NCCL 2.27
	ShrinkShare    *bool  // children of Shrink share resources; NCCL 2.27

	NChannelsPerNetPeer *int  // NCCL 2.28
	NVLinkCentricSched  *bool // favour NVLink over the network; NCCL 2.28
}

// raw turns c into NCCL's struct for the loaded version. Data-path calls of a
// non-blocking communicator start a thread each, so Chorus's always block;
// NewCommunicator runs the initialisation apart instead.
func (c *Config) raw(version int32) (*ncclapi.Config, error) {
	r := ncclapi.NewConfig(version)
	r.Blocking = 1
	if c == nil {
		return r, nil
	}
	for _, f := range []struct {
		name  string
		since int32
		to    *int32
		val   *int32
	}{
		{"CGAClusterSize", 21700, &r.CGAClusterSize, number(c.CGAClusterSize)},
		{"MinCTAs", 21700, &r.MinCTAs, number(c.MinCTAs)},
		{"MaxCTAs", 21700, &r.MaxCTAs, number(c.MaxCTAs)},
		{"SplitShare", 21800, &r.SplitShare, truth(c.SplitShare)},
		{"TrafficClass", 22602, &r.TrafficClass, number(c.TrafficClass)},
		{"CollNet", 22703, &r.CollnetEnable, truth(c.CollNet)},
		{"CTAPolicy", 22703, &r.CTAPolicy, number(c.CTAPolicy)},
		{"ShrinkShare", 22703, &r.ShrinkShare, truth(c.ShrinkShare)},
		{"NChannelsPerNetPeer", 22803, &r.NChannelsPerNetPeer, number(c.NChannelsPerNetPeer)},
		{"NVLinkCentricSched", 22803, &r.NVLinkCentricSched, truth(c.NVLinkCentricSched)},
	} {
		if f.val == nil {
			continue
		}
		if version < f.since {
			return nil, needs("nccl.Config."+f.name, f.since, version)
		}
		*f.to = *f.val
	}
	if c.NetName != "" {
		r.NetName = cstring(c.NetName)
	}
	if c.Name != "" {
		if version < 22703 {
			return nil, needs("nccl.Config.Name", 22703, version)
		}
		r.CommName = cstring(c.Name)
	}
	return r, nil
}

func needs(feature string, since, have int32) error {
	return &device.UnsupportedError{Feature: feature, Need: "NCCL " + ncclapi.VersionText(since), Have: "NCCL " + ncclapi.VersionText(have)}
}

func number(p *int) *int32 {
	if p == nil {
		return nil
	}
	return new(int32(*p))
}

func truth(p *bool) *int32 {
	if p == nil {
		return nil
	}
	if *p {
		return new(int32(1))
	}
	return new(int32(0))
}

func cstring(s string) *byte { return &append([]byte(s), 0)[0] }
