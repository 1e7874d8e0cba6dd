package main

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/device"
)

func newInfoCommand() *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:   "info",
		Short: "Show the devices, the loaded libraries, and the links between devices",
		Long: `Show the devices with their sensor readings, the versions of the driver, CUDA and
NCCL, the path of each loaded library, and the pairs of devices with direct access to
each other's memory. Without a GPU it shows the virtual devices and says so.`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			sys, note, err := device.OrVirtual()
			if err != nil {
				return err
			}
			r, err := inspect(sys, note)
			if err != nil {
				return err
			}
			if asJSON {
				return encode(c.OutOrStdout(), r)
			}
			return r.print(c.OutOrStdout())
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "output in JSON")
	return c
}

// A report is the output of chorus info.
type report struct {
	Backend   string        `json:"backend"`
	Note      string        `json:"note,omitempty"`
	Devices   []deviceInfo  `json:"devices"`
	Libraries []libraryInfo `json:"libraries"`
	Topology  [][]string    `json:"topology"` // [i][j]: how i reaches j
}

type deviceInfo struct {
	Ordinal int `json:"ordinal"`
	*device.Properties
	FreeMemory uint64   `json:"free_memory"`
	Telemetry  *reading `json:"telemetry"`
}

type libraryInfo struct {
	Name    string `json:"name"`
	Version string `json:"version,omitempty"`
	Path    string `json:"path,omitempty"`
	Error   string `json:"error,omitempty"`
}

func inspect(sys *device.System, note string) (*report, error) {
	r := &report{Backend: sys.Backend(), Note: note}
	for _, d := range sys.Devices() {
		p, err := d.Properties()
		if err != nil {
			return nil, err
		}
		free, _, err := d.MemoryInfo()
		if err != nil {
			return nil, err
		}
		told, err := read(d)
		if err != nil {
			return nil, err
		}
		r.Devices = append(r.Devices, deviceInfo{Ordinal: d.Ordinal(), Properties: p, FreeMemory: free, Telemetry: told})
		row, err := links(d, sys.Devices())
		if err != nil {
			return nil, err
		}
		r.Topology = append(r.Topology, row)
	}
	for _, l := range sys.Libraries() {
		i := libraryInfo{Name: l.Name, Version: l.Version, Path: l.Path}
		if l.Err != nil {
			i.Error = l.Err.Error()
		}
		r.Libraries = append(r.Libraries, i)
	}
	return r, nil
}

// links returns how d reaches each device: "self"; "peerN" for direct access,
// where N is the driver's rank of the link and 0 is the fastest; or "host".
func links(d *device.Device, devs []*device.Device) ([]string, error) {
	var row []string
	for _, o := range devs {
		if o == d {
			row = append(row, "self")
			continue
		}
		ok, err := d.CanAccessPeer(o)
		if err != nil {
			return nil, err
		}
		if !ok {
			row = append(row, "host")
			continue
		}
		rank, err := d.PeerRank(o)
		if err != nil {
			return nil, err
		}
		row = append(row, fmt.Sprintf("peer%d", rank))
	}
	return row, nil
}

func (r *report) print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	if r.Note != "" {
		fmt.Fprintf(w, "%s\n\n", r.Note)
	}
	fmt.Fprintf(w, "DEVICE\tNAME\tCAPABILITY\tSMS\tMEMORY\tFREE\tPCI BUS\tUUID\n")
	for _, d := range r.Devices {
		fmt.Fprintf(w, "%s:%d\t%s\t%d.%d\t%d\t%s\t%s\t%s\t%s\n", r.Backend, d.Ordinal, d.Name, d.Major, d.Minor,
			d.Multiprocessors, gib(d.TotalMemory), gib(d.FreeMemory), d.PCIBusID, d.UUID)
	}
	r.printTelemetry(w)
	fmt.Fprintf(w, "\nLIBRARY\tVERSION\tLOADED FROM\n")
	for _, l := range r.Libraries {
		where := l.Path
		if l.Error != "" {
			where = l.Error
		}
		fmt.Fprintf(w, "%s\t%s\t%s\n", l.Name, l.Version, where)
	}
	fmt.Fprintf(w, "\nLINKS")
	for j := range r.Topology {
		fmt.Fprintf(w, "\t%d", j)
	}
	fmt.Fprintln(w)
	for i, row := range r.Topology {
		fmt.Fprintf(w, "%d", i)
		for _, l := range row {
			fmt.Fprintf(w, "\t%s", l)
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintf(w, "\npeerN: direct access, N = 0 is the fastest kind of link; host: copies pass through host memory\n")
	return w.Flush()
}

// printTelemetry prints a line for each device with sensor readings, and once the
// reason for missing readings.
func (r *report) printTelemetry(w io.Writer) {
	fmt.Fprintf(w, "\nTELEMETRY\n")
	missing := ""
	for _, d := range r.Devices {
		if line := d.Telemetry.String(); line != "" {
			fmt.Fprintf(w, "%s:%d\t%s\n", r.Backend, d.Ordinal, line)
		}
		if missing == "" {
			missing = d.Telemetry.Missing
		}
	}
	if missing != "" {
		fmt.Fprintln(w, missing)
	}
}

func gib(bytes uint64) string { return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30)) }
