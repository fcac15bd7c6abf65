"""Labels of copper for ``examples/forces.py``: energies, forces and stresses by the effective-medium potential of ASE.

    python examples/copper_labels.py copper.pt
    python examples/forces.py copper.pt

It needs ASE (``pip install ase``). Other calculators of ASE label crystals in the same way.
"""

import sys

import numpy as np
import torch
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.neighborlist import neighbor_list


def crystal(number, cutoff=4.0):
    """32 atoms in a strained cell, displaced, with their neighbours over its boundaries."""
    draws = np.random.default_rng(number)
    atoms = bulk("Cu", cubic=True).repeat(2)
    atoms.set_cell(atoms.cell @ (np.eye(3) + 0.02 * draws.normal(size=(3, 3))), scale_atoms=True)
    atoms.positions += 0.1 * draws.normal(size=atoms.positions.shape)
    atoms.calc = EMT()
    dst, src, images = neighbor_list("ijS", atoms, cutoff)
    numbers = {
        "pos": atoms.positions,
        "edge_shift": images @ atoms.cell.array,  # an edge spans pos[src] - pos[dst] + edge_shift
        "energy": [atoms.get_potential_energy()],
        "force": atoms.get_forces(),
        "stress": atoms.get_stress(voigt=False)[None],
        "volume": [atoms.get_volume()],
    }
    edge_index = torch.as_tensor(np.stack([src, dst]))
    return {"edge_index": edge_index} | {name: torch.as_tensor(np.array(rows)) for name, rows in numbers.items()}


if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) > 1 else "copper.pt"
    torch.save([crystal(number) for number in range(4)], path)
    print(f"4 crystals of 32 atoms are in {path}")
